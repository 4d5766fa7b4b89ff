#include "backend/reference/reference_backend.h"

#include "backend/reference/reference_impl.h"

namespace moeflux::backend {

std::unique_ptr<Backend> make_reference_backend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace moeflux::backend
