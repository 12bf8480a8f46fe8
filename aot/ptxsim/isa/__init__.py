"""The instructions, one file a group of the PTX ISA, one function an opcode."""
