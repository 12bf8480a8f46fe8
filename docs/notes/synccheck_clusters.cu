// compute-sanitizer's synccheck and clusters of 16 CTAs: see synccheck_clusters.md.
//   nvcc -arch=sm_90a -o synccheck_clusters synccheck_clusters.cu
//   compute-sanitizer --tool synccheck ./synccheck_clusters CTAS CLUSTERS MBARRIER
// Every CTA makes an mbarrier, meets its cluster, arrives at its own mbarrier and waits for it. Nothing is shared.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

__global__ void meet(int use_mbarrier) {
  __shared__ __align__(8) uint64_t barrier;
  uint32_t at = (uint32_t)__cvta_generic_to_shared(&barrier);
  if (use_mbarrier && threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (use_mbarrier) {
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    asm volatile("{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @!done bra WAIT; }" ::"r"(at)
                 : "memory");
  }
}

int main(int, char **arguments) {
  unsigned ctas = atoi(arguments[1]), clusters = atoi(arguments[2]), use_mbarrier = atoi(arguments[3]);
  cudaFuncSetAttribute(meet, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas, clusters), config.blockDim = dim3(128);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim = {ctas, 1, 1};
  config.attrs = &attribute, config.numAttrs = 1;
  cudaError_t launched = cudaLaunchKernelEx(&config, meet, (int)use_mbarrier), ended = cudaDeviceSynchronize();
  printf("%u clusters of %u CTAs, %s mbarrier: %s, %s\n", clusters, ctas, use_mbarrier ? "with" : "without",
         cudaGetErrorName(launched), cudaGetErrorName(ended));
  return ended != cudaSuccess;
}
