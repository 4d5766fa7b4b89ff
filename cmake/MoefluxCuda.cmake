# CUDA without CMake's CUDA language: nvcc makes object files, the C++ compiler links them with the static runtime.
#
#   MOEFLUX_CUDA = AUTO (default: where nvcc is found, not under sanitizers), ON, OFF
#   moeflux_cuda_objects(<out> MODULES <modules whose headers are seen..> SOURCES <files.cu..>)
include_guard(GLOBAL)

set(MOEFLUX_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set(MOEFLUX_CUDA_FLAGS "-gencode=arch=compute_90,code=sm_90;-gencode=arch=compute_90,code=compute_90"
  CACHE STRING "Architectures: machine code for one, and code that newer drivers translate")
find_program(MOEFLUX_NVCC nvcc PATHS /usr/local/cuda/bin)
set(MOEFLUX_HAS_CUDA FALSE)
if(MOEFLUX_CUDA STREQUAL "AUTO")
  if(MOEFLUX_NVCC AND NOT MOEFLUX_SANITIZE)
    set(MOEFLUX_HAS_CUDA TRUE)
  endif()
elseif(MOEFLUX_CUDA)
  if(NOT MOEFLUX_NVCC)
    message(FATAL_ERROR "MOEFLUX_CUDA is ON, but there is no nvcc")
  endif()
  set(MOEFLUX_HAS_CUDA TRUE)
endif()

if(MOEFLUX_HAS_CUDA)
  get_filename_component(nvcc_real ${MOEFLUX_NVCC} REALPATH)
  get_filename_component(cuda_bin ${nvcc_real} DIRECTORY)
  get_filename_component(cuda_root ${cuda_bin} DIRECTORY)
  find_path(MOEFLUX_CUDA_INCLUDE cuda_runtime.h PATHS ${cuda_root}/include REQUIRED)
  find_library(MOEFLUX_CUDART NAMES cudart_static PATHS ${cuda_root}/lib64 ${cuda_root}/lib REQUIRED)
  set(MOEFLUX_NVCC_HOST "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(MOEFLUX_NVCC_HOST -ccbin ${CMAKE_CXX_COMPILER})
  endif()
  message(STATUS "CUDA backend: ${MOEFLUX_NVCC}")
else()
  message(STATUS "CUDA backend: not built")
endif()

# -fmad=false: a multiplication and an addition are two roundings unless the source says fma (docs/architecture.md).
function(moeflux_cuda_objects out)
  cmake_parse_arguments(C "" "" "MODULES;SOURCES" ${ARGN})
  set(includes -I${CMAKE_SOURCE_DIR}/include)
  foreach(m ${C_MODULES})
    list(APPEND includes -I${MOEFLUX_INCLUDE_ROOT}/${m})
  endforeach()
  set(objects "")
  foreach(source ${C_SOURCES})
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
    add_custom_command(OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${MOEFLUX_NVCC} ${MOEFLUX_NVCC_HOST} ${MOEFLUX_CUDA_FLAGS} -std=c++20 -O3
        -fmad=false --expt-relaxed-constexpr -Xcompiler=-fPIC,-ffp-contract=off,-Wall,-Wextra -Werror=all-warnings
        ${includes} -MMD -MF ${object}.d -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
      DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source}
      DEPFILE ${object}.d
      COMMENT "Building CUDA object ${source}.o"
      VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES GENERATED TRUE EXTERNAL_OBJECT TRUE)
  set(${out} ${objects} PARENT_SCOPE)
endfunction()
