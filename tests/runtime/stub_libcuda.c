/* A stand-in for libcuda.so.1 with two devices, for tests of CudaDriver on machines without a GPU.
 *
 * It follows the driver's rules that matter to us: a call needs a current context, a stream belongs to the
 * context of its device, handles 0 to 2 to the current one, a function only runs in its own context. It
 * writes one line per interesting call into a log that the test reads through stub_log().
 * An image is text: "STUB <symbol> <n> <offset> <size> ...".
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
       CAPTURE_IMPLICIT = 906, INVALID_CLUSTER_SIZE = 912 };

static char text[1 << 16];
static size_t used;
static __thread int stack[16];
static __thread int depth;
static int loads;

static void note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    used += (size_t)vsnprintf(text + used, sizeof text - used, format, args);
    va_end(args);
}
const char *stub_log(void) { return text; }
void stub_clear(void) { used = 0; text[0] = 0; }

/* contexts are 100 + device, streams 0x5000 + device (0x6000 + device: under capture) */
static int current(void) { return depth ? stack[depth - 1] : 0; }

int cuInit(unsigned flags) { (void)flags; const char *fail = getenv("STUB_INIT"); return fail ? atoi(fail) : OK; }
int cuDriverGetVersion(int *v) { *v = 13020; return OK; }
int cuDeviceGetCount(int *n) { const char *c = getenv("STUB_DEVICES"); *n = c ? atoi(c) : 2; return OK; }
int cuDeviceGet(int *d, int i) { *d = i; return OK; }
int cuDeviceGetName(char *name, int n, int d) { snprintf(name, (size_t)n, "Stub %d", d); return OK; }
int cuDeviceGetAttribute(int *v, int which, int d) {
    *v = which == 75 ? (d ? 10 : 9) : which == 76 ? 0 : which == 16 ? 132 + d : -1;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(intptr_t)(100 + d); note("retain %d\n", d); return OK; }
int cuCtxPushCurrent(void *c) { stack[depth++] = (int)(intptr_t)c; return OK; }
int cuCtxPopCurrent(void **c) {
    if (!depth) return INVALID_CONTEXT;
    int top = stack[--depth];
    if (c) *c = (void *)(intptr_t)top;
    return OK;
}
int cuCtxSetCurrent(void *c) { depth = 1; stack[0] = (int)(intptr_t)c; return OK; }
int cuCtxGetCurrent(void **c) { *c = (void *)(intptr_t)current(); return OK; }
int cuCtxGetDevice(int *d) { if (!current()) return INVALID_CONTEXT; *d = current() - 100; return OK; }
int cuCtxSynchronize(void) { if (!current()) return INVALID_CONTEXT; note("synchronize %d\n", current() - 100); return OK; }

struct module { int context; char symbol[64]; int count; size_t offset[64], size[64]; int smem; };

int cuModuleLoadData(void **m, const char *image) {
    if (!current()) return INVALID_CONTEXT;
    struct module *made = calloc(1, sizeof *made);
    int at = 0;
    if (sscanf(image, "STUB %63s %d%n", made->symbol, &made->count, &at) != 2) return INVALID_IMAGE;
    for (int i = 0; i < made->count; i++) {
        int step = 0;
        sscanf(image + at, "%zu %zu%n", &made->offset[i], &made->size[i], &step);
        at += step;
    }
    made->context = current();
    made->smem = 49152;
    *m = made;
    note("load %d #%d\n", current() - 100, ++loads);
    return OK;
}
int cuModuleGetFunction(void **f, struct module *m, const char *name) {
    if (current() != m->context) return INVALID_CONTEXT;
    if (strcmp(name, m->symbol)) return NOT_FOUND;
    *f = m;
    return OK;
}
int cuFuncLoad(struct module *f) { note("funcload %s\n", f->symbol); return OK; }
int cuFuncGetParamInfo(struct module *f, size_t i, size_t *offset, size_t *size) {
    if (i >= (size_t)f->count) return INVALID_VALUE;
    *offset = f->offset[i];
    *size = f->size[i];
    return OK;
}
int cuFuncSetAttribute(struct module *f, int which, int value) {
    if (current() != f->context) return INVALID_CONTEXT;
    if (which == 8) f->smem = value;
    note("attribute %d %d=%d\n", f->context - 100, which, value);
    return OK;
}

struct attribute { int id; char pad[4]; unsigned char value[64]; };
struct config { unsigned grid[3], block[3], smem; void *stream; struct attribute *attrs; unsigned count; };

int cuLaunchKernelEx(const struct config *c, struct module *f, void **params, void **extra) {
    intptr_t stream = (intptr_t)c->stream;
    if (!current()) return INVALID_CONTEXT;
    int owner = stream <= 2 ? current() : 100 + (int)(stream & 0xfff);
    if (owner != f->context || extra) return INVALID_HANDLE;
    if ((int)c->smem > f->smem) return INVALID_VALUE;
    note("launch %d stream=%ld grid=%u,%u,%u block=%u,%u,%u smem=%u", f->context - 100, (long)stream, c->grid[0],
         c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->smem);
    for (unsigned i = 0; i < c->count; i++) {
        const unsigned *v = (const unsigned *)c->attrs[i].value;
        if (c->attrs[i].id == 6) note(" pdl=%u", v[0]);
        else if (c->attrs[i].id == 4) note(" cluster=%u,%u,%u", v[0], v[1], v[2]);
        else note(" other=%d", c->attrs[i].id);
    }
    note(" params=");
    for (int i = 0; i < f->count; i++)
        for (size_t b = 0; b < f->size[i]; b++) note("%02x", ((unsigned char *)params[i])[b]);
    note("\n");
    return OK;
}
int cuOccupancyMaxActiveClusters(int *count, struct module *f, const struct config *c) {
    if (current() != f->context) return INVALID_CONTEXT;
    const unsigned *size = NULL;
    for (unsigned i = 0; i < c->count; i++)
        if (c->attrs[i].id == 4) size = (const unsigned *)c->attrs[i].value;
    if (!size || memcmp(size, c->grid, sizeof c->grid)) return INVALID_VALUE;  // a grid is whole clusters
    if (size[0] > 16) return INVALID_VALUE;
    if (size[0] > 8) return INVALID_CLUSTER_SIZE;
    *count = 64 / (int)size[0];
    return OK;
}
int cuStreamIsCapturing(void *s, int *status) {
    intptr_t stream = (intptr_t)s;
    if (stream <= 2 && !current()) return INVALID_CONTEXT;
    if (stream == 1) return CAPTURE_IMPLICIT;
    *status = (stream >> 12) == 6;
    return OK;
}
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int l2, int oob) {
    if (!current()) return INVALID_CONTEXT;
    if ((uintptr_t)map % 64) return INVALID_VALUE;
    if (rank == 5) return INVALID_VALUE;
    memset(map, 0, 128);
    uint64_t head[] = {(uint64_t)type, rank, (uint64_t)(uintptr_t)address, (uint64_t)interleave, (uint64_t)swizzle,
                       (uint64_t)l2, (uint64_t)oob};
    memcpy(map, head, sizeof head);
    map[7] = dims[rank - 1];
    map[8] = rank > 1 ? strides[rank - 2] : 0;
    map[9] = box[rank - 1];
    map[10] = steps[rank - 1];
    return OK;
}
int cuMemAlloc(uintptr_t *p, size_t n) { if (!current()) return INVALID_CONTEXT; *p = (uintptr_t)malloc(n); return OK; }
int cuMemFree(uintptr_t p) { free((void *)p); return OK; }
int cuMemcpyHtoD(uintptr_t p, const void *from, size_t n) { memcpy((void *)p, from, n); return OK; }
int cuMemcpyDtoH(void *to, uintptr_t p, size_t n) { memcpy(to, (void *)p, n); return OK; }
int cuGetErrorString(int code, const char **s) { (void)code; *s = "stub description"; return OK; }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

#define ENTRY(name) {#name, (void *)name}
static const struct { const char *name; void *function; } table[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent),
    ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxGetDevice), ENTRY(cuCtxSynchronize),
    ENTRY(cuModuleLoadData), ENTRY(cuModuleGetFunction), ENTRY(cuFuncLoad), ENTRY(cuFuncGetParamInfo),
    ENTRY(cuFuncSetAttribute), ENTRY(cuLaunchKernelEx), ENTRY(cuOccupancyMaxActiveClusters),
    ENTRY(cuStreamIsCapturing), ENTRY(cuTensorMapEncodeTiled),
    ENTRY(cuMemAlloc), ENTRY(cuMemFree), ENTRY(cuMemcpyHtoD), ENTRY(cuMemcpyDtoH), ENTRY(cuGetErrorString),
    {"cuGetProcAddress", (void *)cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version;
    (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (!strcmp(table[i].name, name)) *function = table[i].function;
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
