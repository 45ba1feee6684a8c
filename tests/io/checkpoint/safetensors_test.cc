#include "io/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

// The bytes of a file with this header and num_data_bytes of data.
std::vector<uint8_t> make_file(const std::string& header, size_t num_data_bytes) {
  const uint64_t length = header.size();
  std::vector<uint8_t> file(sizeof length + header.size() + num_data_bytes);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  return file;
}

std::string padded(std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

// A file of one tensor "w".
std::vector<uint8_t> one_tensor(const std::string& dtype, const std::string& shape,
                                const std::string& offsets, size_t num_data_bytes) {
  return make_file(
      padded(R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}"),
      num_data_bytes);
}

TEST(ParseSafetensors, ReadsEveryDtype) {
  struct Row {
    const char* name;
    DType dtype;
    const char* offsets;  // data_offsets of 8 elements
  };
  for (const Row& row :
       {Row{"BOOL", DType::kBool, "[0,8]"}, Row{"U8", DType::kU8, "[0,8]"}, Row{"I8", DType::kI8, "[0,8]"},
        Row{"U16", DType::kU16, "[0,16]"}, Row{"I16", DType::kI16, "[0,16]"},
        Row{"F16", DType::kF16, "[0,16]"}, Row{"BF16", DType::kBF16, "[0,16]"},
        Row{"U32", DType::kU32, "[0,32]"}, Row{"I32", DType::kI32, "[0,32]"},
        Row{"F32", DType::kF32, "[0,32]"}, Row{"U64", DType::kU64, "[0,64]"},
        Row{"I64", DType::kI64, "[0,64]"}, Row{"F64", DType::kF64, "[0,64]"},
        Row{"F8_E4M3", DType::kF8E4M3, "[0,8]"}, Row{"F8_E5M2", DType::kF8E5M2, "[0,8]"},
        Row{"F8_E8M0", DType::kF8E8M0, "[0,8]"}, Row{"F4", DType::kF4, "[0,4]"}}) {
    const auto file = one_tensor(row.name, "[2,4]", row.offsets, static_cast<size_t>(dtype_bits(row.dtype)));
    const auto entries = parse_safetensors(file);
    ASSERT_TRUE(is_ok(entries)) << row.name;
    ASSERT_EQ(entries->size(), 1u);
    EXPECT_EQ(entries->at(0).spec.name, "w");
    EXPECT_EQ(entries->at(0).spec.dtype, row.dtype);
    EXPECT_EQ(entries->at(0).spec.shape, (std::vector<int64_t>{2, 4}));
    EXPECT_EQ(entries->at(0).end - entries->at(0).begin, dtype_bits(row.dtype));
    EXPECT_EQ(entries->at(0).end, static_cast<int64_t>(file.size()));
  }
}

TEST(ParseSafetensors, AcceptsScalarsEmptyTensorsAndNoTensors) {
  EXPECT_TRUE(is_ok(parse_safetensors(one_tensor("F32", "[]", "[0,4]", 4))));
  EXPECT_TRUE(is_ok(parse_safetensors(one_tensor("F32", "[3,0]", "[0,0]", 0))));
  EXPECT_TRUE(is_ok(parse_safetensors(make_file("{}", 0))));
  EXPECT_TRUE(is_ok(parse_safetensors(make_file(R"({"__metadata__":{"format":"pt"}})", 0))));
}

TEST(ParseSafetensors, RefusesWrongHeaderLengths) {
  const auto with_length = [](uint64_t length) {
    std::vector<uint8_t> file = make_file("{}", 100);
    std::memcpy(file.data(), &length, sizeof length);
    return parse_safetensors(file);
  };
  EXPECT_TRUE(fails_with(parse_safetensors({}), StatusCode::kDataLoss, {"0 bytes"}));
  EXPECT_TRUE(fails_with(parse_safetensors(std::vector<uint8_t>(7)), StatusCode::kDataLoss, {"7 bytes"}));
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{103}, uint64_t{1} << 63, ~uint64_t{0}})
    EXPECT_TRUE(fails_with(with_length(length), StatusCode::kDataLoss,
                           {"length is " + std::to_string(length), "2 to 102", "110 bytes"}));
}

TEST(ParseSafetensors, RefusesWhatIsNoHeader) {
  const auto parse = [](const std::string& header) { return parse_safetensors(make_file(header, 4)); };
  EXPECT_TRUE(fails_with(parse("{\"w\""), StatusCode::kDataLoss, {"not valid JSON"}));
  EXPECT_TRUE(fails_with(parse("{\"\xff\":1}"), StatusCode::kDataLoss, {"not valid JSON"}));
  EXPECT_TRUE(fails_with(parse("[1]"), StatusCode::kDataLoss, {"not a JSON object"}));
  EXPECT_TRUE(fails_with(parse(std::string(100000, '[')), StatusCode::kDataLoss, {"nested deeper than 64"}));
  EXPECT_TRUE(fails_with(parse(R"({"w":1})"), StatusCode::kDataLoss, {"tensor 'w'", "object"}));
  EXPECT_TRUE(
      fails_with(parse(R"({"w":{"shape":[],"data_offsets":[0,4]}})"), StatusCode::kDataLoss, {"dtype"}));
  EXPECT_TRUE(
      fails_with(parse(R"({"w":{"dtype":"F32","data_offsets":[0,4]}})"), StatusCode::kDataLoss, {"shape"}));
  EXPECT_TRUE(
      fails_with(parse(R"({"w":{"dtype":"F32","shape":[]}})"), StatusCode::kDataLoss, {"data_offsets"}));
  EXPECT_TRUE(fails_with(parse(R"({"w":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
                                   "w":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})"),
                         StatusCode::kDataLoss, {"key 'w' appears twice"}));
}

TEST(ParseSafetensors, RefusesWrongTensors) {
  const auto parse = [](const char* dtype, const char* shape, const char* offsets) {
    return parse_safetensors(one_tensor(dtype, shape, offsets, 8));
  };
  EXPECT_TRUE(fails_with(parse("F6", "[2]", "[0,8]"), StatusCode::kUnsupported, {"tensor 'w'", "'F6'"}));
  EXPECT_TRUE(fails_with(parse("F32", "[-2]", "[0,8]"), StatusCode::kDataLoss, {"'w'", "shape", "-2"}));
  EXPECT_TRUE(fails_with(parse("F32", "[2.0]", "[0,8]"), StatusCode::kDataLoss, {"'w'", "shape", "2.0"}));
  EXPECT_TRUE(fails_with(parse("F32", "[99999999999999999999]", "[0,8]"), StatusCode::kDataLoss, {"shape"}));
  EXPECT_TRUE(
      fails_with(parse("F32", "[4294967296,4294967296]", "[0,8]"), StatusCode::kDataLoss, {"overflows"}));
  EXPECT_TRUE(
      fails_with(parse("U8", "[1,1,1,1,1,1,1,1,8]", "[0,8]"), StatusCode::kDataLoss, {"9 dimensions"}));
  EXPECT_TRUE(fails_with(parse("F4", "[3]", "[0,2]"), StatusCode::kDataLoss, {"12 bits"}));
  EXPECT_TRUE(fails_with(parse("F32", "[2]", "[8,0]"), StatusCode::kDataLoss, {"[8, 0]"}));
  EXPECT_TRUE(fails_with(parse("F32", "[2]", "[0,4,8]"), StatusCode::kDataLoss, {"[0, 4, 8]"}));
  EXPECT_TRUE(
      fails_with(parse("F32", "[3]", "[0,12]"), StatusCode::kDataLoss, {"data byte 12", "8 data bytes"}));
  EXPECT_TRUE(
      fails_with(parse("F32", "[1]", "[0,8]"), StatusCode::kDataLoss, {"8 bytes", "F32 [1] needs 4"}));
}

TEST(ParseSafetensors, RefusesHolesOverlapsAndUncoveredBytes) {
  const auto parse = [](const char* a, const char* b, size_t num_data_bytes) {
    return parse_safetensors(
        make_file(padded(std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
                         R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}"),
                  num_data_bytes));
  };
  EXPECT_TRUE(is_ok(parse("[4,8]", "[0,4]", 8)));
  EXPECT_TRUE(
      fails_with(parse("[0,4]", "[2,6]", 6), StatusCode::kDataLoss, {"tensor 'b'", "inside tensor 'a'"}));
  EXPECT_TRUE(
      fails_with(parse("[0,4]", "[0,4]", 4), StatusCode::kDataLoss, {"tensor 'b'", "inside tensor 'a'"}));
  EXPECT_TRUE(fails_with(parse("[0,4]", "[6,10]", 10), StatusCode::kDataLoss,
                         {"tensor 'b'", "hole after tensor 'a'"}));
  EXPECT_TRUE(fails_with(parse("[2,6]", "[6,10]", 10), StatusCode::kDataLoss,
                         {"tensor 'a'", "hole after the header"}));
  EXPECT_TRUE(
      fails_with(parse("[0,4]", "[4,8]", 9), StatusCode::kDataLoss, {"tensor 'b' ends", "but the file has"}));
}

TEST(ParseSafetensors, RefusesMisalignedData) {
  const std::string header = padded(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})");
  EXPECT_TRUE(is_ok(parse_safetensors(make_file(header, 4))));
  EXPECT_TRUE(fails_with(parse_safetensors(make_file(header + " ", 4)), StatusCode::kUnsupported,
                         {"tensor 'w'", "element size 4"}));
}

TEST(ParseSafetensors, SurvivesEveryTruncation) {
  const std::vector<uint8_t> file = one_tensor("F32", "[2]", "[0,8]", 8);
  for (size_t size = 0; size < file.size(); ++size)
    EXPECT_TRUE(fails_with(parse_safetensors({file.data(), size}), StatusCode::kDataLoss, {})) << size;
}

// ---- Writing.

Status fill_with_name(const TensorSpec& spec, const ByteSink& sink) {
  const int64_t num_bytes = tensor_bytes(spec).value();
  for (int64_t i = 0; i < num_bytes; ++i) {  // one byte at a time: pieces can have any size
    const uint8_t byte = static_cast<uint8_t>(spec.name[0] + i);
    const Status status = sink({&byte, 1});
    if (!status.ok()) return status;
  }
  return {};
}

TEST(WriteSafetensors, ReadsBackAlignedInFallingElementSize) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  ASSERT_TRUE(is_ok(write_safetensors(
      path,
      {{"u", DType::kU8, {3}}, {"f", DType::kF32, {2, 1}}, {"s", DType::kF32, {}}, {"b", DType::kBF16, {5}}},
      fill_with_name)));
  EXPECT_FALSE(file_exists(path + ".partial"));
  const auto file = MappedFile::open(path);
  ASSERT_TRUE(is_ok(file));
  const auto entries = parse_safetensors(file->bytes());
  ASSERT_TRUE(is_ok(entries));
  std::string order;
  for (const SafetensorsEntry& entry : *entries) {
    order += entry.spec.name;
    for (int64_t i = entry.begin; i < entry.end; ++i)
      EXPECT_EQ(file->bytes()[static_cast<size_t>(i)],
                static_cast<uint8_t>(entry.spec.name[0] + (i - entry.begin)));
  }
  EXPECT_EQ(order, "fsbu");
  EXPECT_EQ(entries->at(0).begin % 8, 0);
}

TEST(WriteSafetensors, RefusesDuplicatesAndWrongByteCountsAndLeavesTheOldFile) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  ASSERT_TRUE(is_ok(write_text_file(path, "old")));
  EXPECT_TRUE(
      fails_with(write_safetensors(path, {{"u", DType::kU8, {3}}, {"u", DType::kU8, {3}}}, fill_with_name),
                 StatusCode::kInvalidArgument, {"tensor 'u'", "twice"}));
  for (const size_t given : {0, 2, 4})
    EXPECT_TRUE(fails_with(write_safetensors(path, {{"u", DType::kU8, {3}}},
                                             [&](const TensorSpec&, const ByteSink& sink) {
                                               return sink(std::vector<uint8_t>(given));
                                             }),
                           StatusCode::kInvalidArgument, {"tensor 'u'", std::to_string(given), "needs 3"}));
  EXPECT_EQ(read_text_file(path, 100).value(), "old");
  EXPECT_FALSE(file_exists(path + ".partial"));
}

TEST(WriteSafetensors, NamesAFolderThatDoesNotExist) {
  EXPECT_TRUE(fails_with(write_safetensors("/nonexistent/x.safetensors", {}, fill_with_name),
                         StatusCode::kNotFound, {"/nonexistent/x.safetensors"}));
}

}  // namespace
}  // namespace fp4moe
