// Expecting a moeflux::Error by code and by what its message must name.
#pragma once

#include <gtest/gtest.h>
#include <moeflux/error.h>

#include <string>
#include <vector>

namespace moeflux::test {

// Runs `f`, expects that it throws Error with this code and that the message contains every fragment.
template <class F>
void expect_error(F&& f, ErrorCode code, const std::vector<std::string>& fragments) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(error_code_name(e.code()), std::string(error_code_name(code))) << e.what();
    for (const std::string& fragment : fragments)
      EXPECT_NE(std::string(e.what()).find(fragment), std::string::npos) << "no \"" << fragment << "\" in: " << e.what();
    return;
  }
  ADD_FAILURE() << "nothing was thrown; expected " << error_code_name(code);
}

}  // namespace moeflux::test
