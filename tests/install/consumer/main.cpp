// What a program outside this repository sees of moeflux.
#include <moeflux/error.h>

#include <cstdio>

int main() {
  std::puts(moeflux::error_code_name(moeflux::ErrorCode::InvalidModel));
  return 0;
}
