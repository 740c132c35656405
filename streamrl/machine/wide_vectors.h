/* Included first by kernels that gain from vectors of 512 bits: else compilers take half as wide ones, as on the first
   CPUs that had them. */
#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")
#endif
