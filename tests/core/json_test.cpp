#include "core/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace moeflux {
namespace {

using testing::HasSubstr;

std::string failure(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::InvalidModel);
    return e.what();
  }
  return "";
}

TEST(Json, ParsesAndKeepsOrder) {
  const Json j = parse_json(R"({"b": 1, "a": [1, 2.5, true, null, "x"]})", "c.json");
  EXPECT_EQ(j.begin().key(), "b");
  EXPECT_EQ(j["a"].size(), 5u);
}

TEST(Json, SyntaxErrorsNamePlace) {
  const std::string text = failure([] { parse_json("{\n  \"a\": 1,\n  oops\n}", "dir/config.json"); });
  EXPECT_THAT(text, HasSubstr("dir/config.json"));
  EXPECT_THAT(text, HasSubstr("line 3"));
}

TEST(Json, RejectsWhatIsNotOneDocument) {
  for (const char* bad : {"", " ", "{", "{\"a\":}", "[1,]", "{} {}", "nul", "\"\\ud800\"", "\"\xff\"", "01",
                          "{'a':1}", "[1e999999]"})
    EXPECT_NE(failure([&] { parse_json(bad, "x"); }), "") << bad;
}

TEST(Json, DepthIsLimited) {
  const auto nested = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW(parse_json(nested(60), "x"));
  EXPECT_THAT(failure([&] { parse_json(nested(70), "x"); }), HasSubstr("64"));
  EXPECT_THAT(failure([&] { parse_json(std::string(1000000, '['), "x"); }), HasSubstr("64"));
}

TEST(Json, DuplicateKeys) {
  EXPECT_THAT(failure([] { parse_json(R"({"a":1,"b":{"c":1,"c":2}})", "x"); }), HasSubstr("\"c\""));
  EXPECT_NO_THROW(parse_json(R"({"a":{"a":1},"b":[{"a":1},{"a":2}]})", "x"))
      << "equal keys of different objects";
}

TEST(Json, TypedLookup) {
  const Json j = parse_json(
      R"({"i":7,"neg":-3,"f":1.5,"one":1.0,"b":true,"s":"hi","n":null,"big":18446744073709551615})", "o");
  EXPECT_EQ(json_int(j, "i", "o"), 7);
  EXPECT_EQ(json_int(j, "neg", "o"), -3);
  EXPECT_EQ(json_int(j, "absent", "o"), std::nullopt);
  EXPECT_EQ(json_int(j, "n", "o"), std::nullopt);
  EXPECT_EQ(json_number(j, "f", "o"), 1.5);
  EXPECT_EQ(json_number(j, "i", "o"), 7.0);
  EXPECT_EQ(json_bool(j, "b", "o"), true);
  EXPECT_EQ(json_string(j, "s", "o"), "hi");
  EXPECT_EQ(json_find(j, "n"), nullptr);
  EXPECT_EQ(json_find(Json::array(), "i"), nullptr);
  ASSERT_NE(json_find(j, "i"), nullptr);
}

TEST(Json, WrongTypesNameOriginAndKey) {
  const Json j = parse_json(R"({"i":7,"one":1.0,"b":true,"s":"hi","big":18446744073709551615})", "o");
  for (const auto& text :
       {failure([&] { json_int(j, "one", "cfg.json"); }), failure([&] { json_int(j, "s", "cfg.json"); }),
        failure([&] { json_int(j, "b", "cfg.json"); }), failure([&] { json_int(j, "big", "cfg.json"); }),
        failure([&] { json_number(j, "s", "cfg.json"); }), failure([&] { json_bool(j, "i", "cfg.json"); }),
        failure([&] { json_string(j, "i", "cfg.json"); })})
    EXPECT_THAT(text, HasSubstr("cfg.json"));
  EXPECT_THAT(failure([&] { json_int(j, "one", "cfg.json"); }), HasSubstr("\"one\""));
}

}  // namespace
}  // namespace moeflux
