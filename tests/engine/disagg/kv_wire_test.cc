// Frames and payloads between nodes: round trips are exact; damaged, foreign or oversized data is refused
// with an error that names it.
#include "engine/disagg/kv_wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace fp4moe {
namespace {

constexpr uint64_t kEpoch = 0x1234567890abcdefu;
constexpr int64_t kMaxPage = 4096;

// Reads a frame like a receiver.
Status read(std::span<const uint8_t> frame, KvStage stage, uint64_t epoch = kEpoch) {
  const auto header = read_kv_header(frame, {.stage = stage, .epoch = epoch, .max_page_bytes = kMaxPage});
  if (!header.ok()) return header.status();
  const auto rest = frame.subspan(sizeof(KvFrameHeader));
  if (std::ssize(rest) != header->num_bytes) return invalid_argument("the length of the test's frame");
  return check_kv_payload(*header, rest);
}

void expect_refused(const Status& status, const std::string& word) {
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.to_string();
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
}

KvFrameHeader header_of(const std::vector<uint8_t>& frame) {
  KvFrameHeader header;
  std::memcpy(&header, frame.data(), sizeof header);
  return header;
}

TEST(KvWire, EveryFlippedBitOfAFrameIsFound) {
  for (const size_t num_bytes : {0, 1, 40, 257}) {
    std::vector<uint8_t> payload(num_bytes);
    for (size_t i = 0; i < num_bytes; ++i) payload[i] = static_cast<uint8_t>(i * 31);
    std::vector<uint8_t> frame = kv_frame(KvFrameType::kPage, kEpoch, 7, payload);
    ASSERT_TRUE(read(frame, KvStage::kToDecode).ok());
    for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      frame[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
      EXPECT_FALSE(read(frame, KvStage::kToDecode).ok())
          << "bit " << bit << " of a frame with " << num_bytes << " bytes";
      frame[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    }
  }
}

TEST(KvWire, HeadersThatCannotBeAreRefusedByName) {
  const std::vector<uint8_t> frame = kv_frame(KvFrameType::kTake, kEpoch, 1, std::string_view("12345678"));
  for (size_t cut = 0; cut < sizeof(KvFrameHeader); ++cut)
    expect_refused(read(std::span(frame).first(cut), KvStage::kToPrefill),
                   "header of " + std::to_string(cut) + " bytes");
  expect_refused(read(frame, KvStage::kToPrefill, kEpoch + 1), "epoch");
  const auto with = [&](auto change) {
    KvFrameHeader header = header_of(frame);
    change(header);
    std::vector<uint8_t> changed = frame;
    std::memcpy(changed.data(), &header, sizeof header);
    return read(changed, KvStage::kToPrefill);
  };
  const auto greeting = with([](KvFrameHeader& h) { h.magic = 0x20544547; });  // "GET "
  expect_refused(greeting, "magic");
  EXPECT_EQ(greeting.message().find(std::to_string(0x20544547)), std::string::npos)
      << "a stranger's first bytes";
  expect_refused(with([](KvFrameHeader& h) { h.type = static_cast<KvFrameType>(9); }), "type is 9");
  expect_refused(with([](KvFrameHeader& h) { h.type = static_cast<KvFrameType>(0); }), "type is 0");
  expect_refused(with([](KvFrameHeader& h) { h.room = 2; }), "checksum");
}

// Each stage accepts only its own types, and only with sizes that are valid for the type.
TEST(KvWire, StagesAcceptOnlyTheirOwnFrames) {
  const std::vector<std::pair<KvStage, std::vector<uint32_t>>> legal = {{KvStage::kChallenge, {7, 8}},
                                                                        {KvStage::kHello, {1, 7}},
                                                                        {KvStage::kToPrefill, {2, 4, 6}},
                                                                        {KvStage::kToDecode, {3, 5, 7}}};
  for (const auto& [stage, types] : legal)
    for (uint32_t type = 0; type < 12; ++type) {
      const auto frame = kv_frame(static_cast<KvFrameType>(type), kEpoch, 1, std::string_view());
      const bool is_legal = std::ranges::find(types, type) != types.end();
      EXPECT_EQ(read(frame, stage).ok(), is_legal) << static_cast<int>(stage) << " " << type;
    }
  const auto refuses = [](KvStage stage, KvFrameType type, int64_t num_bytes) {
    KvFrameHeader header{.type = type, .epoch = kEpoch, .num_bytes = num_bytes};
    std::vector<uint8_t> bytes(sizeof header);
    std::memcpy(bytes.data(), &header, sizeof header);
    return !read_kv_header(bytes, {.stage = stage, .epoch = kEpoch, .max_page_bytes = kMaxPage}).ok();
  };
  EXPECT_TRUE(refuses(KvStage::kHello, KvFrameType::kHello, kMaxKvHelloBytes + 1));
  EXPECT_FALSE(refuses(KvStage::kHello, KvFrameType::kHello, kMaxKvHelloBytes));
  EXPECT_TRUE(refuses(KvStage::kToDecode, KvFrameType::kFailed, kMaxKvHelloBytes + 1));
  EXPECT_TRUE(refuses(KvStage::kChallenge, KvFrameType::kChallenge, sizeof(KvChallenge) + 1));
  EXPECT_TRUE(refuses(KvStage::kToPrefill, KvFrameType::kRelease, 1));
  EXPECT_TRUE(refuses(KvStage::kToPrefill, KvFrameType::kTake, 9));
}

// Sizes are checked before allocation, including those that wrap or that fit in 32 bits only after
// truncation.
TEST(KvWire, SizesAreJudgedIn64Bits) {
  for (const int64_t num_bytes :
       {int64_t{-1}, kMaxKvMessageBytes + 1, int64_t{1} << 32, (int64_t{1} << 32) + 8,
        std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    KvFrameHeader header{.type = KvFrameType::kPrefill, .epoch = kEpoch, .num_bytes = num_bytes};
    std::vector<uint8_t> bytes(sizeof header);
    std::memcpy(bytes.data(), &header, sizeof header);
    expect_refused(read(bytes, KvStage::kToPrefill), std::to_string(num_bytes));
    header.type = KvFrameType::kPage;
    header.num_bytes = kMaxPage + 1;
    std::memcpy(bytes.data(), &header, sizeof header);
    expect_refused(read(bytes, KvStage::kToDecode), std::to_string(kMaxPage));
  }
}

SamplingParams every_parameter() {
  SamplingParams s;
  s.temperature = 0.7f;
  s.top_p = std::nextafter(0.9f, 1.0f);
  s.top_k = 40;
  s.min_p = 0.05f;
  s.frequency_penalty = -0.5f;
  s.presence_penalty = 1.25f;
  s.repetition_penalty = 1.1f;
  s.logit_bias = {{5, -100}, {7, 0.3f}};
  s.seed = std::numeric_limits<uint64_t>::max() - 3;
  s.max_new_tokens = int64_t{1} << 40;
  s.min_new_tokens = 3;
  s.stop = {"\n\n", "caf\u00e9"};
  s.stop_regex = {"[a-z]+$"};
  s.stop_token_ids = {1, 2};
  s.ignore_eos = true;
  s.skip_special_tokens = false;
  s.no_stop_trim = true;
  s.top_logprobs = 4;
  s.token_ids_logprob = {9, 2147483647, 9};
  s.grammar = {GrammarSpec::Kind::kRegex, "[0-9]+"};
  return s;
}

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(KvWire, ARequestComesBackAsItWas) {
  const SamplingParams s = every_parameter();
  const auto request = decode_prefill(bytes_of(encode_prefill({.input_ids = {0, 2147483647, 9},
                                                               .sampling = s,
                                                               .client = "key 3",
                                                               .prompt_logprobs_from = 1,
                                                               .routed_experts_from = 0,
                                                               .priority = -4})));
  ASSERT_TRUE(request.ok()) << request.status().to_string();
  EXPECT_EQ(request->input_ids, (std::vector<int32_t>{0, 2147483647, 9}));
  EXPECT_EQ(request->client, "key 3");
  EXPECT_EQ(request->prompt_logprobs_from, 1);
  EXPECT_EQ(request->priority, -4);
  EXPECT_EQ(request->routed_experts_from, 0);
  EXPECT_EQ(decode_prefill(bytes_of(encode_prefill({.input_ids = {1}, .sampling = s})))->priority,
            std::nullopt);
  const SamplingParams& r = request->sampling;
  EXPECT_EQ(r.temperature, s.temperature);
  EXPECT_EQ(r.top_p, s.top_p);
  EXPECT_EQ(r.top_k, s.top_k);
  EXPECT_EQ(r.min_p, s.min_p);
  EXPECT_EQ(r.frequency_penalty, s.frequency_penalty);
  EXPECT_EQ(r.presence_penalty, s.presence_penalty);
  EXPECT_EQ(r.repetition_penalty, s.repetition_penalty);
  ASSERT_EQ(r.logit_bias.size(), 2u);
  EXPECT_EQ(r.logit_bias[1].token_id, 7);
  EXPECT_EQ(r.logit_bias[1].bias, 0.3f);
  EXPECT_EQ(r.seed, s.seed);
  EXPECT_EQ(r.max_new_tokens, s.max_new_tokens);
  EXPECT_EQ(r.min_new_tokens, s.min_new_tokens);
  EXPECT_EQ(r.stop, s.stop);
  EXPECT_EQ(r.stop_regex, s.stop_regex);
  EXPECT_EQ(r.stop_token_ids, s.stop_token_ids);
  EXPECT_EQ(r.ignore_eos, s.ignore_eos);
  EXPECT_EQ(r.skip_special_tokens, s.skip_special_tokens);
  EXPECT_EQ(r.no_stop_trim, s.no_stop_trim);
  EXPECT_EQ(r.top_logprobs, s.top_logprobs);
  EXPECT_EQ(r.token_ids_logprob, s.token_ids_logprob);
  EXPECT_EQ(r.grammar, s.grammar);
}

TEST(KvWire, AFirstTokenComesBackToTheBit) {
  FirstToken first;
  first.cached_tokens = 32;
  first.token = {.token_id = 17,
                 .logprob = -0.1f,
                 .top = {{17, -0.1f, {}}, {3, -INFINITY, {}}},
                 .ids = {{4, -7.5f, {}}}};
  first.experts = {3, 1, 0};
  first.scored = {{.token_id = 5, .logprob = -2.5f}};
  const auto back = decode_first_token(bytes_of(encode_first_token(first)));
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back->cached_tokens, 32);
  EXPECT_EQ(back->token.token_id, 17);
  EXPECT_EQ(back->token.logprob, -0.1f);
  ASSERT_EQ(back->token.top.size(), 2u);
  EXPECT_EQ(back->token.top[1].token_id, 3);
  EXPECT_EQ(back->token.top[1].logprob, -INFINITY);
  ASSERT_EQ(back->token.ids.size(), 1u);
  EXPECT_EQ(back->token.ids[0].token_id, 4);
  EXPECT_EQ(back->token.ids[0].logprob, -7.5f);
  ASSERT_EQ(back->scored.size(), 1u);
  EXPECT_EQ(back->experts, first.experts);
  EXPECT_EQ(back->scored[0].token_id, 5);
  EXPECT_EQ(back->scored[0].logprob, -2.5f);
}

TEST(KvWire, MalformedPayloadsAreRefused) {
  const std::string good = encode_prefill({.input_ids = {1, 2, 3}, .sampling = every_parameter()});
  for (size_t cut = 0; cut < good.size(); ++cut)
    EXPECT_EQ(decode_prefill(bytes_of(good.substr(0, cut))).status().code(), StatusCode::kDataLoss);
  for (const std::string bad :
       {R"({"cached_tokens": 0, "scored": [], "experts": [], "token": [4294967297, 0, [], []]})",
        R"({"cached_tokens": 0, "scored": [], "experts": [], "token": [1.5, 0, [], []]})",
        R"({"cached_tokens": 0, "scored": [], "experts": [], "token": [18446744073709551615, 0, [], []]})",
        R"({"cached_tokens": 0, "scored": [], "experts": [], "token": [1, 0]})",
        R"({"cached_tokens": 0, "experts": [], "token": [1, 0, [], []]})", R"([])", R"("x")"})
    EXPECT_EQ(decode_first_token(bytes_of(bad)).status().code(), StatusCode::kDataLoss) << bad;
  for (const std::string epoch : {"1e61", "-1", "2.5", "true", "null"})
    EXPECT_EQ(decode_kv_hello(bytes_of(R"({"facts": [], "epoch": )" + epoch + "}")).status().code(),
              StatusCode::kDataLoss)
        << epoch;
  EXPECT_EQ(decode_failure(bytes_of(R"({"code": 0, "message": "fine"})")).code(), StatusCode::kDataLoss);
  EXPECT_EQ(decode_failure(bytes_of(encode_failure(does_not_fit("too \xff long")))).code(),
            StatusCode::kDoesNotFit);
  EXPECT_FALSE(decode_take(bytes_of("1234567")).ok());
}

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

// Depth, values and keys are limited before anything is built; messages never quote the peer at length.
TEST(KvWire, HostileJsonIsRefusedWithAShortMessage) {
  const std::string deep = repeated("[", 100'000), closed = deep + repeated("]", 100'000);
  const std::string text = "\"" + repeated("\\u001b[31m\\n", 10'000) + "\"";
  std::vector<std::string> hostile = {deep, closed, text, "[" + text + "]"};
  for (const std::string& value : {deep, closed, text, std::string("{}")})
    for (const std::string field :
         {"epoch", "facts", "input_ids", "stop", "token", "scored", "code", "message"})
      hostile.push_back("{\"" + field + "\": " + value + "}");
  hostile.push_back(R"({"epoch": 1, "facts": [[[[[1]]]]]})");
  hostile.push_back("{\"epoch\": 1, \"facts\": [[\"model\", " + text + "]]}");
  hostile.push_back("{\"epoch\": 1, \"facts\": [" + repeated("[\"a\", \"b\"],", 16) + "[\"a\", \"b\"]]}");
  hostile.push_back("{\"epoch\": " + closed + ", \"facts\": []}");
  hostile.push_back("{" + text + ": 1, " + text + ": 2}");
  hostile.push_back("[" + repeated("[],", 1 << 20) + "[]]");
  for (const std::string& json : hostile) {
    const std::span<const uint8_t> payload = bytes_of(json);
    for (const Status& status : {decode_kv_hello(payload).status(), decode_prefill(payload).status(),
                                 decode_first_token(payload).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kDataLoss) << json.substr(0, 60);
      EXPECT_LT(status.message().size(), 300u) << json.substr(0, 60);
      EXPECT_EQ(status.message().find_first_of("\n\x1b"), std::string::npos) << json.substr(0, 60);
    }
    EXPECT_LT(decode_failure(payload).message().size(), 300u);
  }
}

// A wrong value is described by its field, type and size.
TEST(KvWire, WrongFieldsAreNamed) {
  const auto message = [](const std::string& json) {
    return decode_kv_hello(bytes_of(json)).status().message();
  };
  EXPECT_EQ(message(R"({"facts": [], "epoch": [1, 2]})"),
            "malformed hello: epoch: expected a non-negative integer, got array of 2");
  EXPECT_EQ(message(R"({"facts": "abc", "epoch": 1})"),
            "malformed hello: facts: expected an array, got string of 3 bytes");
  EXPECT_EQ(message(R"({"epoch": 1})"), "malformed hello: facts is missing");
}

// Text from the other node appears in a local error as a single line of bounded length.
TEST(KvWire, FailuresAreEscapedAndCut) {
  const std::string text = "first\nsecond \x1b[31m" + std::string(1 << 20, 'x');
  const std::string honest = encode_failure(unavailable(text));
  EXPECT_LT(honest.size(), 2000u);
  const std::string hostile = R"({"code": 7, "message": "a\nb)" + std::string(5000, 'y') + "\"}";
  for (const std::string& payload : {honest, hostile}) {
    const Status status = decode_failure(bytes_of(payload));
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.message();
    EXPECT_LT(status.message().size(), 1100u);
    EXPECT_EQ(status.message().find_first_of("\n\x1b"), std::string::npos) << status.message();
  }
  const Status differs =
      compare_hello({1, {{"model", "a"}}}, {1, {{"model", "b\n\x1b[31m" + std::string(200, 'z')}}});
  EXPECT_LT(differs.message().size(), 300u);
  EXPECT_EQ(differs.message().find_first_of("\n\x1b"), std::string::npos) << differs.message();
}

TEST(KvWire, PagesMustBeOfThePromptAndWhole) {
  const KvPageShape shape{.num_tokens = 35, .token_bytes = 6, .page_size = 16};
  const auto page = [&](int64_t index, int64_t num_tokens, int64_t num_bytes) {
    const KvPageHeader header{index, num_tokens};
    std::vector<uint8_t> payload(sizeof header + static_cast<size_t>(num_bytes));
    std::memcpy(payload.data(), &header, sizeof header);
    return decode_page(payload, shape).status();
  };
  EXPECT_TRUE(page(0, 16, 96).ok());
  EXPECT_TRUE(page(2, 3, 18).ok());
  expect_refused(page(3, 3, 18), "page 3");
  expect_refused(page(-1, 16, 96), "page -1");
  expect_refused(page(2, 16, 96), "16 tokens");
  expect_refused(page(0, 16, 95), "95 bytes");
  expect_refused(decode_page(std::vector<uint8_t>(15), shape).status(), "15 bytes");
}

// The last pages have the window layers' rows too; no other page may have them.
TEST(KvWire, OnlyTheLastPagesHaveWindowRows) {
  const KvPageShape shape{
      .num_tokens = 35, .token_bytes = 6, .page_size = 16, .window_token_bytes = 4, .first_window_page = 1};
  const auto page = [&](int64_t index, int64_t num_tokens, int64_t num_bytes) {
    const KvPageHeader header{index, num_tokens};
    std::vector<uint8_t> payload(sizeof header + static_cast<size_t>(num_bytes));
    std::memcpy(payload.data(), &header, sizeof header);
    return decode_page(payload, shape).status();
  };
  EXPECT_TRUE(page(0, 16, 16 * 6).ok());
  EXPECT_TRUE(page(1, 16, 16 * 10).ok());
  EXPECT_TRUE(page(2, 3, 3 * 10).ok());
  expect_refused(page(0, 16, 16 * 10), "160 bytes, expected 96");
  expect_refused(page(2, 3, 3 * 6), "18 bytes, expected 30");
}

// Which number is right depends on the room, not on the prompt.
TEST(KvWire, PagesHaveTheNumberOfTheirTake) {
  const KvPageShape shape{.num_tokens = 35, .token_bytes = 6, .page_size = 16};
  for (const int64_t take : {int64_t{1}, int64_t{2}, int64_t{0}, INT64_MIN, INT64_MAX}) {
    const KvPageHeader header{.index = 2, .num_tokens = 3, .take = take};
    std::vector<uint8_t> payload(sizeof header + 18);
    std::memcpy(payload.data(), &header, sizeof header);
    const auto page = decode_page(payload, shape);
    ASSERT_TRUE(page.ok()) << page.status().to_string();
    EXPECT_EQ(page->take, take);
    payload.resize(sizeof header - 1);
    expect_refused(decode_page(payload, shape).status(), "a page of 23 bytes; expected at least 24");
  }
}

// Pieces of the state follow the pages, numbered after them; all but the last have the same size.
TEST(KvWire, PiecesOfAStateFollowThePages) {
  constexpr int64_t kPiece = kKvStatePieceBytes;
  for (const int64_t rest : {int64_t{1}, int64_t{100}, kPiece}) {
    const KvPageShape shape{
        .num_tokens = 35, .token_bytes = 6, .page_size = 16, .state_bytes = 2 * kPiece + rest};
    const auto part = [&](int64_t index, int64_t num_tokens, int64_t num_bytes) {
      const KvPageHeader header{index, num_tokens};
      std::vector<uint8_t> payload(sizeof header + static_cast<size_t>(num_bytes));
      std::memcpy(payload.data(), &header, sizeof header);
      return decode_page(payload, shape).status();
    };
    EXPECT_EQ(shape.num_parts(), 6);
    EXPECT_TRUE(part(2, 3, 18).ok());
    EXPECT_TRUE(part(3, 0, kPiece).ok());
    EXPECT_TRUE(part(5, 0, rest).ok());
    EXPECT_EQ(shape.state_offset(5) + shape.bytes_of(5), shape.state_bytes);
    expect_refused(part(6, 0, rest), "expected 0 to 5");
    expect_refused(part(INT64_MAX, 0, rest),
                   "page 9223372036854775807 of a prompt of 35 tokens and a state of ");
    expect_refused(part(INT64_MIN, 0, rest), "page -9223372036854775808");
    expect_refused(part(3, 16, kPiece), "page 3 has 16 tokens, expected 0");
    expect_refused(part(3, 0, kPiece - 1), "expected 524288");
    expect_refused(part(5, 0, rest + 1), "bytes, expected " + std::to_string(rest));
    expect_refused(part(5, 0, 0), "page 5 has 0 bytes");
  }
}

TEST(KvWire, NodesThatServeDifferentThingsNameBoth) {
  const KvHello prefill{kEpoch, {{"protocol", "1"}, {"page size", "16"}}},
      same = prefill, other{0, {{"protocol", "1"}, {"page size", "32"}}}, less{0, {{"protocol", "1"}}};
  EXPECT_TRUE(compare_hello(prefill, same).ok());
  const Status status = compare_hello(prefill, other);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "page size is 16 on the prefill node and 32 on the decode node; they must be the same");
  EXPECT_FALSE(compare_hello(prefill, less).ok());
  EXPECT_FALSE(compare_hello(less, prefill).ok());
  const auto back = decode_kv_hello(bytes_of(encode_kv_hello(prefill)));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->facts, prefill.facts);
  EXPECT_EQ(back->epoch, kEpoch);
}

}  // namespace
}  // namespace fp4moe
