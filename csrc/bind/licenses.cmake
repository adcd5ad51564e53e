# Copies the licence texts of everything that the Python module contains into the wheel, beside LICENSE and
# NOTICE. The texts come from the versions that this build uses, so they need no copy in the sources.
set(UNISONO_LICENSES ${CMAKE_CURRENT_BINARY_DIR}/licenses)

# Writes the first file that matches a pattern as the licence text of `name`.
function(copy_license name)
  file(GLOB found ${ARGN})
  if(found)
    list(GET found 0 first)
    configure_file(${first} ${UNISONO_LICENSES}/${name}.txt COPYONLY)
  else()
    message(WARNING "The licence text of ${name} was not found (${ARGN}). A wheel that is given to others must "
      "contain the text. Install ${name} with pip.")
  endif()
endfunction()

get_filename_component(packages ${nanobind_DIR}/../.. ABSOLUTE)
copy_license(nanobind ${packages}/nanobind-*.dist-info/licenses/LICENSE ${packages}/nanobind-*.dist-info/LICENSE
  ${nanobind_DIR}/../LICENSE)
get_filename_component(packages ${Python_NumPy_INCLUDE_DIR}/../../.. ABSOLUTE)
copy_license(numpy ${packages}/numpy-*.dist-info/licenses/LICENSE.txt ${packages}/numpy-*.dist-info/LICENSE.txt)

# `make wheels` links the C++ runtime of this folder statically.
if(UNISONO_ZIG)
  foreach(library libcxx libcxxabi libunwind)
    copy_license(${library} ${UNISONO_ZIG}/lib/${library}/LICENSE.TXT)
  endforeach()
  copy_license(zig ${UNISONO_ZIG}/LICENSE)
endif()

# robin-map's licence is the first comment of its header.
file(READ ${nanobind_DIR}/../ext/robin_map/include/tsl/robin_map.h header)
string(FIND "${header}" "*/" end)
string(SUBSTRING "${header}" 0 ${end} text)
string(REGEX REPLACE "(^|\n)[ /]*\\*+ ?" "\\1" text "${text}")
file(WRITE ${UNISONO_LICENSES}/robin_map.txt "${text}")

if(SKBUILD)
  install(DIRECTORY ${UNISONO_LICENSES}/ DESTINATION ${SKBUILD_METADATA_DIR}/licenses)
endif()
