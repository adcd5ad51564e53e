// Binds copies and fills of memory to the C library. Where the core needs a function of zig's runtime
// library (quadruple precision on aarch64), its memcpy would come along, which is a third slower.
#if defined(__x86_64__)
__asm__(".symver memcpy, memcpy@GLIBC_2.14");
__asm__(".symver memmove, memmove@GLIBC_2.2.5");
__asm__(".symver memset, memset@GLIBC_2.2.5");
#else
__asm__(".symver memcpy, memcpy@GLIBC_2.17");
__asm__(".symver memmove, memmove@GLIBC_2.17");
__asm__(".symver memset, memset@GLIBC_2.17");
#endif
