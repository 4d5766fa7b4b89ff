// The one exception type of moeflux.
//
// Every failure that crosses a function boundary is a moeflux::Error: a code for programs and a
// message for people that names the file, the tensor and the offset where there is one. A normal
// "no" (a cache miss, an absent optional tensor) is a value, never an Error.
#pragma once

#include <stdexcept>
#include <string>

namespace moeflux {

enum class ErrorCode {
  InvalidArgument,  // the caller's input: a token id out of range, an empty prompt, a bad option
  InvalidModel,     // a file that breaks its format's rules or does not fit its config
  Unsupported,      // well-formed, but something this build does not implement
  Io,               // the operating system refused: open, read, write
  OutOfMemory,      // the budget or the machine cannot hold what was asked for
  Cancelled,        // the caller asked to stop
  Internal,         // a bug in moeflux
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// "invalid argument", "invalid model", .. for messages and the C ABI.
const char* error_code_name(ErrorCode code) noexcept;

}  // namespace moeflux
