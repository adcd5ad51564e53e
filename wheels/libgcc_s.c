/* Stands for libgcc_s.so.1 when a wheel is linked. When an interpreter ends, glibc unwinds daemon threads
 * with libgcc_s; if the core had an unwinder of its own, the two would read each other's state and
 * crash. So the core uses that of the machine, as all C++ libraries of Linux do. */
#define STUB(name) void name(void) {}
STUB(_Unwind_Backtrace)
STUB(_Unwind_DeleteException)
STUB(_Unwind_ForcedUnwind)
STUB(_Unwind_GetCFA)
STUB(_Unwind_GetDataRelBase)
STUB(_Unwind_GetGR)
STUB(_Unwind_GetIP)
STUB(_Unwind_GetIPInfo)
STUB(_Unwind_GetLanguageSpecificData)
STUB(_Unwind_GetRegionStart)
STUB(_Unwind_GetTextRelBase)
STUB(_Unwind_RaiseException)
STUB(_Unwind_Resume)
STUB(_Unwind_Resume_or_Rethrow)
STUB(_Unwind_SetGR)
STUB(_Unwind_SetIP)
