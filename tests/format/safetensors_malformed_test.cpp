// Every rule of the safetensors reader, broken one at a time.
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "format/raw_safetensors.h"
#include "format/safetensors.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using test::expect_error;
using test::little_endian;
using test::raw_safetensors;
using test::TempDir;

struct Case {
  std::string label;
  std::string file;
  std::vector<std::string> message;  // fragments, besides the file's name
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.label; }

// One entry "t" of one byte with a part replaced.
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"t\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
}
Case bad_entry(const std::string& label, const std::string& header, std::size_t data_bytes,
               const std::string& rule) {
  return {label, raw_safetensors(header, data_bytes), {"tensor \"t\"", rule}};
}
Case bad_offsets(const std::string& label, const std::string& offsets, const std::string& rule) {
  return bad_entry(label, entry("\"U8\"", "[1]", offsets), 1, rule);
}
Case bad_shape(const std::string& label, const std::string& shape, const std::string& rule) {
  return bad_entry(label, entry("\"F32\"", shape, "[0,8]"), 8, rule);
}
std::string two(const std::string& first, const std::string& second) {
  return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
         R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
}
const std::string kGood = R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";

std::vector<Case> frame_cases() {
  return {
      {"empty file", "", {"0 bytes", "too short"}},
      {"seven bytes", std::string(7, '\0'), {"7 bytes", "too short"}},
      {"length 0", little_endian(0) + kGood, {"header length is 0"}},
      {"length alone", little_endian(2), {"header length 2", "beyond the end"}},
      {"length one beyond the file", little_endian(kGood.size() + 2) + kGood + "x", {"beyond the end"}},
      {"length over the limit", little_endian(100'000'001) + kGood, {"100000001", "limit of 100000000"}},
      {"length 2^63", little_endian(1ull << 63) + kGood, {"9223372036854775808", "limit"}},
      {"length 2^64-1", little_endian(UINT64_MAX) + kGood, {"18446744073709551615", "limit"}},
      {"length 2^64-8", little_endian(UINT64_MAX - 7) + kGood, {"limit"}},
      {"not an object", raw_safetensors("[]"), {"does not begin with '{'", "0x5b"}},
      {"space before the object", raw_safetensors(" {}"), {"does not begin with '{'"}},
      {"byte order mark", raw_safetensors("\xEF\xBB\xBF{}"), {"does not begin with '{'", "0xef"}},
      {"newline after the object", raw_safetensors("{}\n"), {"must end in '}'", "byte 10", "0x0a"}},
      {"NUL after the object", raw_safetensors(std::string("{}\0\0", 4)), {"must end in '}'"}},
      {"second object", raw_safetensors("{}{}"), {"header", "not valid JSON"}},
      {"header cut off", raw_safetensors(kGood.substr(0, 30)), {"must end in '}'"}},
      {"broken JSON",
       raw_safetensors(R"({"t":{"dtype" "U8"}})"),
       {"header (bytes 8 to 28)", "not valid JSON"}},
      {"unclosed string", raw_safetensors(R"({"t})"), {"not valid JSON"}},
      {"trailing comma", raw_safetensors(R"({"t":{},})"), {"not valid JSON"}},
      {"invalid UTF-8", raw_safetensors("{\"t\xC3\":{}}"), {"not valid UTF-8"}},
      {"overlong UTF-8", raw_safetensors("{\"t\xC0\x80\":{}}"), {"not valid UTF-8"}},
      {"nine levels", raw_safetensors(R"({"t":{"x":[[[[[[[1]]]]]]]}})"), {"nested deeper than 8"}},
      {"100,000 levels",
       raw_safetensors("{\"t\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}"),
       {"nested deeper than 8"}},
  };
}

std::vector<Case> entry_cases() {
  return {
      bad_entry("entry is a number", R"({"t":1})", 0, "not an object"),
      bad_entry("entry is null", R"({"t":null})", 0, "not an object"),
      bad_entry("no dtype", R"({"t":{"shape":[1],"data_offsets":[0,1]}})", 1, "\"dtype\" is missing"),
      bad_entry("no shape", R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", 1, "\"shape\" is missing"),
      bad_entry("no offsets", R"({"t":{"dtype":"U8","shape":[1]}})", 1, "\"data_offsets\" is missing"),
      bad_entry("dtype twice", R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
                "\"dtype\" appears twice"),
      bad_entry("shape twice", R"({"t":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1,
                "\"shape\" appears twice"),
      bad_entry("offsets twice",
                R"({"t":{"dtype":"U8","data_offsets":[0,1],"shape":[1],"data_offsets":[0,1]}})", 1,
                "\"data_offsets\" appears twice"),
      bad_entry("key hidden by an escape",
                R"({"t":{"dtype":"U8","shape":[1],"sh\u0061pe":[1],"data_offsets":[0,1]}})", 1,
                "\"shape\" appears twice"),
      bad_entry("unknown dtype", entry("\"F33\"", "[1]", "[0,1]"), 1, "unknown dtype \"F33\""),
      bad_entry("dtype in small letters", entry("\"u8\"", "[1]", "[0,1]"), 1, "unknown dtype"),
      bad_entry("dtype is a number", entry("8", "[1]", "[0,1]"), 1, "dtype is not a string"),
      bad_shape("shape is a number", "2", "shape is not an array"),
      bad_shape("shape of strings", "[\"2\"]", "shape[0]"),
      bad_shape("negative dim", "[-2]", "shape[0]"),
      bad_shape("fractional dim", "[2.0]", "shape[0]"),
      bad_shape("dim is null", "[2,null]", "shape[1]"),
      bad_shape("rank 9", "[2,1,1,1,1,1,1,1,1]", "more than 8"),
      bad_shape("product overflows", "[1099511627776,1099511627776]", "overflows"),
      bad_shape("product overflows beside a zero", "[1099511627776,0,1099511627776]", "overflows"),
      bad_shape("bits overflow", "[4611686018427387904]", "overflows"),
      bad_shape("product wraps to the right size", "[9223372036854775808,2,2]", "overflows"),
      bad_shape("too small for its offsets", "[1]", "span 8 bytes, F32 [1] takes 4"),
      bad_shape("too large for its offsets", "[3]", "span 8 bytes, F32 [3] takes 12"),
      bad_shape("zero dim with bytes", "[0,2]", "takes 0"),
      bad_entry("scalar of the wrong size", entry("\"F32\"", "[]", "[0,8]"), 8,
                "span 8 bytes, F32 [] takes 4"),
      bad_entry("half a byte", entry("\"F4\"", "[3]", "[0,2]"), 2, "no whole number of bytes"),
      bad_offsets("offsets are a number", "1", "data_offsets is not an array"),
      bad_offsets("one offset", "[0]", "1 numbers instead of 2"),
      bad_offsets("three offsets", "[0,1,1]", "more than 2"),
      bad_offsets("negative offset", "[-1,0]", "data_offsets[0]"),
      bad_offsets("fractional offset", "[0.0,1]", "data_offsets[0]"),
      bad_offsets("exponent", "[0,1e0]", "data_offsets[1]"),
      bad_offsets("offset as string", "[0,\"1\"]", "data_offsets[1]"),
      bad_offsets("begin after end", "[1,0]", "[1, 0]"),
      bad_offsets("beyond the file", "[0,2]", "beyond the end of the file"),
      bad_offsets("far beyond the file", "[18446744073709551614,18446744073709551615]",
                  "beyond the end of the file"),
      {"offset NaN", raw_safetensors(entry("\"U8\"", "[1]", "[NaN,1]"), 1), {"not valid JSON"}},
      {"offset with leading zero", raw_safetensors(entry("\"U8\"", "[1]", "[00,1]"), 1), {"not valid JSON"}},
      {"offset over 64 bits",
       raw_safetensors(entry("\"U8\"", "[1]", "[0,18446744073709551616]"), 1),
       {"fit 64 bits"}},
      {"minus zero",
       raw_safetensors(entry("\"U8\"", "[1]", "[-0,1]"), 1),
       {"byte 55", "plain non-negative integer"}},
      {"fraction in an ignored key",
       raw_safetensors(R"({"t":{"dtype":"U8","x":1.5,"shape":[1],"data_offsets":[0,1]}})", 1),
       {"plain non-negative integer"}},
      {"exponent in an ignored key",
       raw_safetensors(R"({"t":{"dtype":"U8","x":1e5,"shape":[1],"data_offsets":[0,1]}})", 1),
       {"plain non-negative integer"}},
  };
}

std::vector<Case> file_cases() {
  const std::string good = R"({"dtype":"U8","shape":[1],"data_offsets":)";
  const std::string long_name(513, 'n');
  return {
      {"same name twice",
       raw_safetensors("{\"t\":" + good + "[0,1]},\"t\":" + good + "[1,2]}}", 2),
       {"tensor \"t\"", "appears twice"}},
      {"same name by escape",
       raw_safetensors("{\"t\":" + good + "[0,1]},\"\\u0074\":" + good + "[1,2]}}", 2),
       {"tensor \"t\"", "appears twice"}},
      {"empty name", raw_safetensors("{\"\":" + good + "[0,1]}}", 1), {"tensor \"\"", "name is empty"}},
      {"NUL in name",
       raw_safetensors("{\"t\\u0000x\":" + good + "[0,1]}}", 1),
       {"tensor \"t\\x00x\"", "NUL"}},
      {"name over 512 bytes",
       raw_safetensors("{\"" + long_name + "\":" + good + "[0,1]}}", 1),
       {"tensor \"nnnn", "513 bytes long"}},
      {"surrogate in name", raw_safetensors("{\"t\\udc00\":" + good + "[0,1]}}", 1), {"not valid"}},
      {"overlap", raw_safetensors(two("[0,4]", "[3,7]"), 7), {"tensor \"b\"", "overlapping tensor \"a\""}},
      {"same bytes twice", raw_safetensors(two("[0,4]", "[0,4]"), 4), {"overlapping"}},
      {"hole", raw_safetensors(two("[0,4]", "[5,9]"), 9), {"tensor \"b\"", "hole after tensor \"a\""}},
      {"hole at the start",
       raw_safetensors(two("[1,5]", "[5,9]"), 9),
       {"tensor \"a\"", "hole after the header"}},
      {"tail", raw_safetensors(two("[0,4]", "[4,8]"), 9), {"1 bytes at byte", "no tensor"}},
      {"data without tensors", raw_safetensors("{}", 3), {"3 bytes at byte 10", "no tensor"}},
      {"empty tensor inside another",
       raw_safetensors(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
           4),
       {"tensor \"e\"", "overlapping tensor \"a\""}},
      {"truncated data",
       raw_safetensors(two("[0,4]", "[4,8]"), 7),
       {"tensor \"b\"", "beyond the end of the file"}},
      {"metadata is a string",
       raw_safetensors(R"({"__metadata__":"mlx"})"),
       {"__metadata__ is not an object"}},
      {"metadata is null", raw_safetensors(R"({"__metadata__":null})"), {"__metadata__ is not an object"}},
      {"metadata of numbers",
       raw_safetensors(R"({"__metadata__":{"format":1}})"),
       {"__metadata__ \"format\" is not a string"}},
      {"metadata nested",
       raw_safetensors(R"({"__metadata__":{"format":{"a":"b"}}})"),
       {"\"format\" is not a string"}},
      {"metadata key twice",
       raw_safetensors(R"({"__metadata__":{"format":"pt","format":"mlx"}})"),
       {"\"format\" appears twice"}},
      {"metadata twice",
       raw_safetensors(R"({"__metadata__":{},"__metadata__":{}})"),
       {"__metadata__ appears twice"}},
  };
}

class Malformed : public testing::TestWithParam<Case> {};

TEST_P(Malformed, IsAnErrorNamingFileAndRule) {
  const Case& c = GetParam();
  TempDir dir;
  const std::filesystem::path path = dir.write("bad.safetensors", c.file);
  std::vector<std::string> fragments = c.message;
  fragments.push_back(path.string());
  SCOPED_TRACE(c.label);
  expect_error([&] { read_safetensors_header(io::File::open(path)); }, ErrorCode::InvalidModel, fragments);
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  std::string name;
  for (const char c : info.param.label) name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(Frame, Malformed, testing::ValuesIn(frame_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Entry, Malformed, testing::ValuesIn(entry_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(File, Malformed, testing::ValuesIn(file_cases()), case_name);

// A large file without content costs nothing to make; it must cost little to refuse.
TEST(MalformedSparse, HugeHeaderOfZeros) {
  TempDir dir;
  const std::filesystem::path path = dir.write("sparse.safetensors", little_endian(100'000'000));
  std::filesystem::resize_file(path, 100'000'008);
  expect_error([&] { read_safetensors_header(io::File::open(path)); }, ErrorCode::InvalidModel,
               {"sparse.safetensors", "does not begin with '{'", "0x00"});
}

TEST(MalformedSparse, TensorOfATerabyteThatIsNotThere) {
  TempDir dir;
  const std::string header =
      R"({"t":{"dtype":"F32","shape":[274877906944],"data_offsets":[0,1099511627776]}})";
  const std::filesystem::path path = dir.write("short.safetensors", raw_safetensors(header, 100));
  expect_error([&] { read_safetensors_header(io::File::open(path)); }, ErrorCode::InvalidModel,
               {"short.safetensors", "tensor \"t\"", "1099511627776", "beyond the end of the file"});
}

TEST(MalformedOpen, TruncatedAfterOpening) {
  TempDir dir;
  const std::filesystem::path path = dir.write("shrinking.safetensors", raw_safetensors(kGood, 1));
  const io::File file = io::File::open(path);
  std::filesystem::resize_file(path, 20);
  expect_error([&] { read_safetensors_header(file); }, ErrorCode::Io,
               {"shrinking.safetensors", "ends early"});
  std::filesystem::resize_file(path, 3);
  expect_error([&] { read_safetensors_header(file); }, ErrorCode::Io,
               {"shrinking.safetensors", "ends early"});
}

}  // namespace
}  // namespace moeflux::format
