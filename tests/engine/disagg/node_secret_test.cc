#include "engine/disagg/node_secret.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace fp4moe {
namespace {

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string hex(const NodeProof& proof) {
  std::string text;
  for (const uint8_t byte : proof) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

const std::string kSecret = "0123456789abcdef0123456789abcdef";

// Python: hmac.new(key, b"fp4moe node hello 2" + b"\1" + b"\x11" * 32 + b"\x22" * 32 + b"{}", "sha256")
TEST(NodeSecret, ProofsAreHmacSha256) {
  const auto secret = NodeSecret::make(bytes_of(kSecret));
  ASSERT_TRUE(secret.ok());
  NodeNonce prefill, decode;
  prefill.fill(0x11);
  decode.fill(0x22);
  EXPECT_EQ(hex(secret->prove(NodeRole::kPrefill, prefill, decode, bytes_of("{}"))),
            "f71ef1ab0c36a6df336d45802a8a527d3055af86ddcdea9aa41663ea81b7a640");
}

TEST(NodeSecret, AProofHoldsForItsOwnInputsAlone) {
  const auto secret = NodeSecret::make(bytes_of(kSecret)), other = NodeSecret::make(bytes_of(kSecret + "x"));
  ASSERT_TRUE(secret.ok() && other.ok());
  const NodeNonce a = random_nonce(), b = random_nonce();
  EXPECT_NE(a, b);
  const std::string text = "{\"epoch\": 1}";
  NodeProof proof = secret->prove(NodeRole::kDecode, a, b, bytes_of(text));
  EXPECT_TRUE(secret->verify(proof, NodeRole::kDecode, a, b, bytes_of(text)));
  EXPECT_FALSE(secret->verify(proof, NodeRole::kPrefill, a, b, bytes_of(text)));
  EXPECT_FALSE(secret->verify(proof, NodeRole::kDecode, b, a, bytes_of(text)));
  EXPECT_FALSE(secret->verify(proof, NodeRole::kDecode, a, b, bytes_of(text + " ")));
  EXPECT_FALSE(other->verify(proof, NodeRole::kDecode, a, b, bytes_of(text)));
  for (size_t bit = 0; bit < 8 * proof.size(); ++bit) {
    proof[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_FALSE(secret->verify(proof, NodeRole::kDecode, a, b, bytes_of(text))) << bit;
    proof[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

class SecretFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string folder = testing::TempDir() + "fp4moe-secret-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string write(const std::string& bytes, mode_t mode = 0600) {
    const std::string path = folder_ + "/secret";
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  std::string folder_;
};

TEST_F(SecretFile, OneFinalNewlineIsNoPartOfIt) {
  const NodeNonce a = random_nonce(), b = random_nonce();
  const auto wanted = NodeSecret::make(bytes_of(kSecret))->prove(NodeRole::kDecode, a, b, {});
  for (const std::string ending : {"", "\n", "\r\n"}) {
    const auto secret = NodeSecret::load(write(kSecret + ending));
    ASSERT_TRUE(secret.ok()) << secret.status().to_string();
    EXPECT_TRUE(secret->is_set());
    EXPECT_EQ(secret->prove(NodeRole::kDecode, a, b, {}), wanted);
  }
  for (const std::string ending : {"\n\n", "\r"}) {
    const auto longer = NodeSecret::load(write(kSecret + ending));
    ASSERT_TRUE(longer.ok());
    EXPECT_NE(longer->prove(NodeRole::kDecode, a, b, {}), wanted);
  }
}

TEST_F(SecretFile, FilesThatOthersMayReadAreRefused) {
  for (const mode_t mode : {0400, 0600, 0440, 0640}) {
    const auto secret = NodeSecret::load(write(kSecret, mode));
    EXPECT_TRUE(secret.ok()) << secret.status().to_string();
    EXPECT_EQ(chmod((folder_ + "/secret").c_str(), 0600), 0);
  }
  for (const mode_t mode : {0644, 0604, 0602, 0660, 0620, 0777}) {
    const Status status = NodeSecret::load(write(kSecret, mode)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << mode;
    EXPECT_NE(status.message().find("has mode"), std::string::npos) << status.message();
    EXPECT_EQ(chmod((folder_ + "/secret").c_str(), 0600), 0);
  }
}

TEST_F(SecretFile, LengthsAndKindsOfFilesAreChecked) {
  for (const size_t size : {0, 1, 15, 4097, 100'000}) {
    const Status status = NodeSecret::load(write(std::string(size, 'S'))).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << size;
    EXPECT_EQ(status.message().find("SSS"), std::string::npos) << "the secret is in the message";
  }
  EXPECT_TRUE(NodeSecret::load(write(std::string(16, 'S'))).ok());
  EXPECT_TRUE(NodeSecret::load(write(std::string(4096, 'S') + "\n")).ok());
  EXPECT_EQ(NodeSecret::load(folder_ + "/none").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(NodeSecret::load(folder_).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(NodeSecret::load("/dev/zero").status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace fp4moe
