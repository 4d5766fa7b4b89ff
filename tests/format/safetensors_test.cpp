#include "format/safetensors.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>

#include "format/raw_safetensors.h"
#include "io/path.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using test::expect_error;
using test::raw_safetensors;
using test::slurp;
using test::TempDir;

SafetensorsHeader header_of(const std::filesystem::path& path) {
  return read_safetensors_header(io::File::open(path));
}

std::string data_of(const std::filesystem::path& path, const TensorInfo& info) {
  return slurp(path).substr(info.offset, info.bytes);
}

TEST(SafetensorsWrite, RoundTrip) {
  TempDir dir;
  const std::array<float, 6> floats{1, 2, 3, 4, 5, 6};
  const std::array<std::uint8_t, 3> bytes{7, 8, 9};
  const std::array<std::uint64_t, 1> scalar{42};
  const std::vector<TensorData> tensors{
      {"layer.weight", DType::F32, {2, 3}, floats.data()},
      {"odd \"name\"\n\xC3\xA9", DType::U8, {3}, bytes.data()},
      {"empty", DType::BF16, {4, 0, 5}, nullptr},
      {"scalar", DType::U64, {}, scalar.data()},
      {"packed", DType::F4, {3, 2}, bytes.data()},
  };
  write_safetensors(dir / "x.safetensors", tensors, {{"format", "pt"}, {"note", "tab\t\"quote\""}});

  const SafetensorsHeader header = header_of(dir / "x.safetensors");
  EXPECT_EQ(header.metadata,
            (std::map<std::string, std::string>{{"format", "pt"}, {"note", "tab\t\"quote\""}}));
  ASSERT_EQ(header.tensors.size(), tensors.size());
  EXPECT_EQ(header.tensors[0].offset % 8, 0u) << "the header is padded";
  for (const TensorData& want : tensors) {
    const auto got = std::find_if(header.tensors.begin(), header.tensors.end(),
                                  [&](const TensorInfo& t) { return t.name == want.name; });
    ASSERT_NE(got, header.tensors.end()) << want.name;
    EXPECT_EQ(got->dtype, want.dtype);
    EXPECT_EQ(got->shape, want.shape);
    EXPECT_EQ(got->bytes, tensor_bytes(want.dtype, want.shape));
    if (got->bytes == 0) continue;
    EXPECT_EQ(data_of(dir / "x.safetensors", *got),
              std::string(static_cast<const char*>(want.data), got->bytes));
  }
}

TEST(SafetensorsWrite, NoTensorsAtAll) {
  TempDir dir;
  write_safetensors(dir / "none.safetensors", {});
  EXPECT_TRUE(header_of(dir / "none.safetensors").tensors.empty());
}

TEST(SafetensorsWrite, RefusesWhatNobodyCouldRead) {
  TempDir dir;
  const std::array<std::byte, 64> data{};
  const auto refused = [&](const std::vector<TensorData>& tensors, const std::string& rule) {
    expect_error([&] { write_safetensors(dir / "x.safetensors", tensors); }, ErrorCode::InvalidArgument,
                 {"x.safetensors", rule});
  };
  refused({{"", DType::U8, {1}, data.data()}}, "not a legal name");
  refused({{"__metadata__", DType::U8, {1}, data.data()}}, "not a legal name");
  refused({{std::string(513, 'n'), DType::U8, {1}, data.data()}}, "not a legal name");
  refused({{std::string("a\0b", 3), DType::U8, {1}, data.data()}}, "not a legal name");
  refused({{"a\xFF", DType::U8, {1}, data.data()}}, "not a legal name");
  refused({{"a", DType::U8, {1}, data.data()}, {"a", DType::U8, {1}, data.data()}}, "appears twice");
  refused({{"a", DType::U8, std::vector<std::uint64_t>(9, 1), data.data()}}, "too many dimensions");
  refused({{"a", DType::F32, {1ull << 40, 1ull << 40}, data.data()}}, "overflows");
  refused({{"a", DType::F4, {3}, data.data()}}, "whole number of bytes");
  refused({{"a", DType::U8, {1}, nullptr}}, "no data");
  std::vector<TensorData> huge;  // each of 2^61 - 1 bytes: legal one by one
  for (int i = 0; i < 9; ++i) huge.push_back({std::to_string(i), DType::U8, {(1ull << 61) - 1}, data.data()});
  refused(huge, "together overflow");
  expect_error(
      [&] {
        write_safetensors(dir / "x.safetensors", {}, {{"k", "\xFF"}});
      },
      ErrorCode::InvalidArgument, {"x.safetensors", "\"k\"", "UTF-8"});
  expect_error([&] { write_safetensors(dir / "none/x.safetensors", {}); }, ErrorCode::Io,
               {"none/x.safetensors"});
  EXPECT_TRUE(io::list_folder(dir.path()).empty()) << "a failure leaves nothing behind";
}

TEST(TensorBytes, CountsBits) {
  const auto bytes = [](DType dtype, std::vector<std::uint64_t> shape) { return tensor_bytes(dtype, shape); };
  EXPECT_EQ(bytes(DType::F32, {}), 4u);
  EXPECT_EQ(bytes(DType::BF16, {3, 5}), 30u);
  EXPECT_EQ(bytes(DType::F4, {2, 3}), 3u);
  EXPECT_EQ(bytes(DType::F6E2M3, {4}), 3u);
  EXPECT_EQ(bytes(DType::F6E2M3, {3}), std::nullopt);
  EXPECT_EQ(bytes(DType::F32, {0, 7}), 0u);
  EXPECT_EQ(bytes(DType::U8, {1ull << 61}), std::nullopt) << "bits overflow";
  EXPECT_EQ(bytes(DType::U8, {(1ull << 61) - 1}), (1ull << 61) - 1);
  EXPECT_EQ(bytes(DType::U8, {1ull << 40, 1ull << 40}), std::nullopt);
  EXPECT_EQ(bytes(DType::U8, {1ull << 40, 0, 1ull << 40}), std::nullopt) << "a zero hides nothing";
}

// Legal, if unusual.
TEST(SafetensorsRead, Accepts) {
  TempDir dir;
  const auto accepted = [&](const std::string& header, std::size_t data_bytes) {
    const auto path = dir.write("x.safetensors", raw_safetensors(header, data_bytes));
    try {
      return header_of(path);
    } catch (const Error& e) {
      ADD_FAILURE() << header << ": " << e.what();
      return SafetensorsHeader{};
    }
  };
  EXPECT_TRUE(accepted("{}", 0).tensors.empty());
  EXPECT_TRUE(accepted("{}     ", 0).tensors.empty());
  EXPECT_EQ(accepted(R"({"__metadata__":{"format":"mlx"}})", 0).metadata.at("format"), "mlx");

  // An odd header length: the data begins at any byte.
  std::string odd = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  if (odd.size() % 2 == 0) odd += ' ';
  SafetensorsHeader h = accepted(odd, 8);
  ASSERT_EQ(h.tensors.size(), 1u);
  EXPECT_EQ(h.tensors[0].offset % 2, 1u);

  // Zero dims and scalars; an empty tensor before, between and after others; header order is free.
  h = accepted(R"({"last":{"dtype":"F32","shape":[],"data_offsets":[8,12]},
                   "e3":{"dtype":"F32","shape":[3,0],"data_offsets":[12,12]},
                   "first":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},
                   "e2":{"dtype":"F64","shape":[0],"data_offsets":[8,8]},
                   "e1":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}})",
               12);
  ASSERT_EQ(h.tensors.size(), 5u);
  std::string order;
  for (const TensorInfo& t : h.tensors) order += t.name + " ";
  EXPECT_EQ(order, "e1 first e2 last e3 ");

  // Unknown keys of an entry are ignored, also nested up to the limit; 8 levels are legal.
  h = accepted(
      R"({"a":{"dtype":"U8","x":[[[[[[1]]]]]],"shape":[1],"y":true,"data_offsets":[0,1],"z":"-1.5e3"}})", 1);
  EXPECT_EQ(h.tensors.size(), 1u);
  // Escapes in names are undone.
  h = accepted(R"({"a\u00e9\"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  ASSERT_EQ(h.tensors.size(), 1u);
  EXPECT_EQ(h.tensors[0].name, "a\xC3\xA9\"b");
  // Longest name, highest rank.
  h = accepted(
      "{\"" + std::string(512, 'n') + R"(":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})",
      1);
  EXPECT_EQ(h.tensors.size(), 1u);
  // Names that only look alike.
  h = accepted(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"A":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
      2);
  EXPECT_EQ(h.tensors.size(), 2u);
}

TEST(SafetensorsRead, EveryDtype) {
  TempDir dir;
  for (const char* name :
       {"BOOL", "U8",  "I8",  "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
        "I16",  "U16", "F16", "BF16",    "I32",     "U32",     "F32",         "I64",
        "U64",  "F64", "C64", "F4",      "F6_E2M3", "F6_E3M2"}) {
    const std::size_t bytes = 8 * dtype_bits(dtype_from_name(name).value()) / 8;
    const std::string header = std::string(R"({"a":{"dtype":")") + name +
                               R"(","shape":[8],"data_offsets":[0,)" + std::to_string(bytes) + "]}}";
    const SafetensorsHeader h = header_of(dir.write("x.safetensors", raw_safetensors(header, bytes)));
    EXPECT_EQ(dtype_name(h.tensors.at(0).dtype), name);
    EXPECT_EQ(h.tensors.at(0).bytes, bytes);
  }
}

}  // namespace
}  // namespace moeflux::format
