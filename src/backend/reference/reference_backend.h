// The oracle of every other backend: naive, obviously right, slow.
//
// It computes the mathematics of an op (backend/ops.h) in f64 with the C library's functions and rounds to
// f32 when it stores; other backends must agree within their rounding errors. Only roundings that are part of
// a definition are kept: 8-bit activations, f16 caches, the f32 angle of a rotation.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace moeflux::backend {

// Single-threaded, host memory, no state: streams are independent.
std::unique_ptr<Backend> make_reference_backend();

}  // namespace moeflux::backend
