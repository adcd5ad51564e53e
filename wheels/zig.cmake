# Toolchain file: compiles for Linux with glibc 2.28 or newer with the clang and libc++ of `ziglang`.
# ZIG is the path of its program, WHEEL_ARCHITECTURE is x86_64 or aarch64, UNWINDER is a stand-in for
# libgcc_s.so.1 (libgcc_s.c says why).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "$ENV{WHEEL_ARCHITECTURE}")
set(CMAKE_CXX_COMPILER "$ENV{ZIG}" c++ -target "$ENV{WHEEL_ARCHITECTURE}-linux-gnu.2.28")
set(CMAKE_CXX_ARCHIVE_CREATE "\"$ENV{ZIG}\" ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "\"$ENV{ZIG}\" ranlib <TARGET>")
# nanobind uses `stderr`, and only libstdc++ includes its header.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h -include ${CMAKE_CURRENT_LIST_DIR}/glibc_copies.h -Wno-macro-redefined")
set(CMAKE_EXE_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s $ENV{UNWINDER} -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/symbols.map")
# The thread-local storage of this dialect loses vector registers before glibc 2.40 (its bug 31372).
set(NB_HAS_MTLS_GNU2 OFF CACHE INTERNAL "")
# The licences of the C++ runtime that is linked into the wheel (csrc/bind/licenses.cmake).
get_filename_component(UNISONO_ZIG "$ENV{ZIG}" DIRECTORY)
