# CUDA without CMake's CUDA language: nvcc makes object files, the C++ compiler links them with the static runtime.
#
#   MOEFLUX_CUDA = AUTO (default: where nvcc is found, not under sanitizers), ON, OFF
#   moeflux_cuda_objects(<out> MODULES <modules whose headers are seen..> SOURCES <files.cu..>)
#     A source file's property MOEFLUX_CUDA_FLAGS stands in for the variable of that name.
include_guard(GLOBAL)

set(MOEFLUX_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set(MOEFLUX_CUDA_FLAGS "-gencode=arch=compute_80,code=sm_80;-gencode=arch=compute_90,code=sm_90;-gencode=arch=compute_90,code=compute_90"
  CACHE STRING "Architectures: machine code for all of 8.x and for 9.0, and code that newer devices' drivers translate")
find_program(MOEFLUX_NVCC nvcc PATHS /usr/local/cuda/bin)

# Where nvcc's headers and libraries are, by its own word: the nvcc in the PATH may be a link or a script that calls
# the one inside the toolkit. Sets MOEFLUX_CUDA_INCLUDE and MOEFLUX_CUDART, or <why> to what is missing.
function(moeflux_find_cuda why)
  set(${why} "" PARENT_SCOPE)
  if(NOT MOEFLUX_NVCC)
    set(${why} "there is no nvcc" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${MOEFLUX_NVCC} --dryrun -x cu /dev/null
    OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE status)
  if(NOT said MATCHES "#\\$ TOP=([^\n]+)")
    set(${why} "${MOEFLUX_NVCC} does not say where its toolkit is" PARENT_SCOPE)
    return()
  endif()
  string(STRIP "${CMAKE_MATCH_1}" top)
  find_path(MOEFLUX_CUDA_INCLUDE cuda_runtime.h
    PATHS ${top}/include ${top}/targets/x86_64-linux/include NO_CMAKE_FIND_ROOT_PATH)
  find_library(MOEFLUX_CUDART NAMES cudart_static
    PATHS ${top}/lib64 ${top}/lib ${top}/targets/x86_64-linux/lib NO_CMAKE_FIND_ROOT_PATH)
  foreach(part MOEFLUX_CUDA_INCLUDE MOEFLUX_CUDART)
    if(NOT ${part})
      set(${why} "${MOEFLUX_NVCC} is there, but its toolkit in ${top} lacks cuda_runtime.h or libcudart_static.a" PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

set(MOEFLUX_HAS_CUDA FALSE)
set(cuda_missing "MOEFLUX_CUDA is OFF")
if(MOEFLUX_CUDA STREQUAL "AUTO" AND MOEFLUX_SANITIZE)
  set(cuda_missing "not under sanitizers")
elseif(MOEFLUX_CUDA)
  moeflux_find_cuda(cuda_missing)
  if(NOT cuda_missing)
    set(MOEFLUX_HAS_CUDA TRUE)
  elseif(NOT MOEFLUX_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "MOEFLUX_CUDA is ON, but ${cuda_missing}")
  endif()
endif()

if(MOEFLUX_HAS_CUDA)
  set(MOEFLUX_NVCC_HOST "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(MOEFLUX_NVCC_HOST -ccbin ${CMAKE_CXX_COMPILER})
  endif()
  message(STATUS "CUDA backend: ${MOEFLUX_NVCC}, ${MOEFLUX_CUDART}")
else()
  message(STATUS "CUDA backend: not built (${cuda_missing})")
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
    get_source_file_property(architectures ${source} MOEFLUX_CUDA_FLAGS)
    if(NOT architectures)
      set(architectures ${MOEFLUX_CUDA_FLAGS})
    endif()
    add_custom_command(OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${MOEFLUX_NVCC} ${MOEFLUX_NVCC_HOST} ${architectures} -std=c++20 -O3
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
