#include "server/fake_engine.h"

#include <nlohmann/json.hpp>
#include <set>

namespace fp4moe {

namespace {

// Length in bytes of the UTF-8 character starting with `lead`.
size_t utf8_length(unsigned char lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

}  // namespace

FakeEngine::FakeEngine(FakeOptions options) : options_(options) {
  info_.name = "fake";
  info_.aliases = options.aliases;
  info_.path = weights_.model_path = "/models/fake";
  info_.tokenizer_path = "/models/fake/tokenizer";
  info_.architecture = "FakeForCausalLM";
  info_.quantization = "mxfp4";
  info_.vocab_size = 257;
  info_.context_length = options.context_length;
  info_.max_bytes_per_token = options.max_bytes_per_token;
  info_.page_size = 16;
  info_.max_total_tokens = 8192;
  info_.max_running_requests = 64;
  info_.eos_token_ids = {kEnd};
  info_.default_sampling.temperature = 0;
  info_.chat_template = options.chat_template;
  info_.has_grammars = options.has_grammars;
  thread_ = std::thread([this] { loop(); });
}

FakeEngine::~FakeEngine() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (auto& [id, r] : running_) r->cancelled = true;
  }
  changed_.notify_all();
  thread_.join();
}

Result<std::string> FakeEngine::submit(Request request, DeltaCallback on_delta) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_ || running_.size() >= options_.max_requests) return unavailable("the queue is full");
  for (const int32_t id : request.input_ids) {
    if (id < 0 || id > kEnd + static_cast<int32_t>(options_.special_tokens.size()))
      return invalid_argument("token id " + std::to_string(id) + " is not in 0..256");
  }
  if (static_cast<int64_t>(request.input_ids.size()) >= info_.context_length)
    return does_not_fit(std::to_string(request.input_ids.size()) + " prompt tokens, context " +
                        std::to_string(info_.context_length));
  if (const auto at = running_.find(request.id); at != running_.end() && !at->second->has_ended)
    return invalid_argument("request id \"" + request.id + "\" is in use");
  last_ = request;
  submitted_.fetch_add(1);
  auto r = std::make_shared<Running>();
  for (const int32_t id : request.input_ids) r->prompt += token_bytes(id);
  r->request = std::move(request);
  r->on_delta = std::move(on_delta);
  const std::string id = r->request.id;
  running_[id] = std::move(r);
  changed_.notify_all();
  return id;
}

void FakeEngine::cancel(const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto at = running_.find(id); at != running_.end()) at->second->cancelled = true;
}

Result<int64_t> FakeEngine::update_weights(const WeightSource& source, bool aborts) {
  ++num_updates_;
  if (source.model_path.find("SLOW") != std::string::npos) may_end_update_.get_future().wait();
  std::lock_guard<std::mutex> lock(mutex_);
  if (source.model_path.find("ABSENT") != std::string::npos)
    return not_found("no '" + source.model_path + "'");
  if (source.model_path.find("LOST") != std::string::npos) return failure_ = internal_error("rank 1: lost");
  weights_ = source;
  if (aborts)
    for (auto& [id, r] : running_) r->cancelled = true;
  changed_.notify_all();
  return static_cast<int64_t>(running_.size());
}

WeightSource FakeEngine::weight_source() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return weights_;
}

Status FakeEngine::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

Status FakeEngine::flush_cache() {
  if (running() > 0) return unavailable("requests run");
  flushes_.fetch_add(1);
  return {};
}

void FakeEngine::drain(double timeout_seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  draining_ = true;
  const auto idle = [this] { return running_.empty(); };
  if (changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), idle)) return;
  for (auto& [id, r] : running_) r->cancelled = true;
  changed_.wait(lock, idle);
}

ExpertLoad FakeEngine::expert_load() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return load_;
}

void FakeEngine::set_expert_load(ExpertLoad load) {
  std::lock_guard<std::mutex> lock(mutex_);
  load_ = std::move(load);
}

EngineStats FakeEngine::stats() const {
  EngineStats stats;
  stats.num_running_reqs = running();
  stats.num_requests_total = submitted_.load();
  stats.generation_tokens_total = generated_.load();
  stats.num_aborted_requests_total = aborted_.load();
  stats.max_total_num_tokens = info_.max_total_tokens;
  return stats;
}

Result<std::vector<int32_t>> FakeEngine::tokenize(std::string_view text, bool) const {
  std::vector<int32_t> ids;
  while (!text.empty()) {
    int32_t id = static_cast<unsigned char>(text.front());
    for (size_t i = 0; i < options_.special_tokens.size(); ++i)
      if (text.starts_with(options_.special_tokens[i])) id = kEnd + 1 + static_cast<int32_t>(i);
    ids.push_back(id);
    text.remove_prefix(token_bytes(id).size());
  }
  return ids;
}

std::vector<int32_t> FakeEngine::find_special_tokens(std::string_view text) const {
  std::set<int32_t> found;
  const Result<std::vector<int32_t>> ids = tokenize(text, false);
  for (const int32_t id : *ids)
    if (id > kEnd) found.insert(id);
  return {found.begin(), found.end()};
}

Result<std::string> FakeEngine::detokenize(const std::vector<int32_t>& ids, bool skip_special_tokens) const {
  std::string text;
  for (const int32_t id : ids)
    if (id < kEnd || !skip_special_tokens) text += token_bytes(id);
  return text;
}

std::string FakeEngine::token_bytes(int32_t id) const {
  if (id >= 0 && id < kEnd) return std::string(1, static_cast<char>(id));
  const auto special = static_cast<size_t>(id - kEnd - 1);
  return id > kEnd && special < options_.special_tokens.size() ? options_.special_tokens[special] : "";
}

Result<std::string> FakeEngine::apply_chat_template(std::string_view messages_json,
                                                    const ChatTemplateOptions& options) const {
  const auto messages = nlohmann::json::parse(messages_json);
  std::string text;
  for (const auto& m : messages) {
    if (options_.is_system_first && m["role"] == "system" && &m != &messages.front())
      return invalid_argument("chat template, line 1: the system message is not the first one");
    if (m["content"] == "BAD") return invalid_argument("chat template, line 1: bad content");
    text += m["content"].get<std::string>();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  last_messages_ = messages_json;
  last_options_ = options;
  return text;
}

Request FakeEngine::last_request() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

std::string FakeEngine::last_messages() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_messages_;
}

ChatTemplateOptions FakeEngine::last_options() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_options_;
}

int64_t FakeEngine::running() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(running_.size());
}

void FakeEngine::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ || !running_.empty()) {
    if (running_.empty()) changed_.wait(lock, [this] { return stopping_ || !running_.empty(); });
    const auto batch = running_;
    for (const auto& [id, r] : batch) {
      const bool cancelled = r->cancelled;
      lock.unlock();
      Delta delta;
      if (!cancelled && !std::exchange(r->scored, true)) deliver_scores(*r);
      if (cancelled) {
        delta.finish_reason = FinishReason::kAbort;
        delta.completion_tokens = r->generated;
        aborted_.fetch_add(1);
      } else {
        delta = next(*r);
      }
      if (const int64_t from = r->request.routed_experts_from;
          from >= 0 && delta.finish_reason != FinishReason::kNone)
        delta.routed_experts = std::make_shared<const std::vector<int32_t>>(
            std::vector<int32_t>{static_cast<int32_t>(from), 258, -1});
      delta.prompt_tokens = static_cast<int64_t>(r->request.input_ids.size());
      delta.cached_tokens = (delta.prompt_tokens - 1) / kPage * kPage;
      generated_.fetch_add(static_cast<int64_t>(delta.token_ids.size()));
      const bool last = delta.finish_reason != FinishReason::kNone;
      lock.lock();
      r->has_ended = last;
      lock.unlock();
      r->on_delta(delta);
      lock.lock();
      if (last && running_[id] == r) running_.erase(id);
    }
    changed_.notify_all();
    if (options_.step.count() > 0) {
      lock.unlock();
      std::this_thread::sleep_for(options_.step);
      lock.lock();
    }
  }
}

// The log-probabilities of the ids that the request lists: -id / 4.
std::vector<TokenLogprob> FakeEngine::listed_ids(const SamplingParams& sampling) const {
  std::vector<TokenLogprob> ids;
  for (const int32_t id : sampling.token_ids_logprob)
    ids.push_back({id, -static_cast<float>(id) / 4, token_bytes(id)});
  return ids;
}

void FakeEngine::deliver_scores(const Running& r) const {
  if (r.request.prompt_logprobs_from < 0) return;
  Delta delta;
  for (size_t p = static_cast<size_t>(r.request.prompt_logprobs_from) + 1; p < r.request.input_ids.size();
       ++p) {
    const int32_t id = r.request.input_ids[p];
    PositionLogprobs scored{{id, -static_cast<float>(p), token_bytes(id)}, {}, {}};
    if (r.request.sampling.top_logprobs > 0) scored.top.push_back({'a', 0, "a"});
    scored.ids = listed_ids(r.request.sampling);
    delta.prompt_logprobs.push_back(std::move(scored));
  }
  r.on_delta(delta);
}

Delta FakeEngine::next(Running& r) const {
  const SamplingParams& s = r.request.sampling;
  Delta delta;
  const auto n = static_cast<size_t>(r.generated++);
  delta.completion_tokens = r.generated;
  if (n == 2 && r.prompt.find("FAIL") != std::string::npos) {
    delta.finish_reason = FinishReason::kError;
    delta.error = "asked to fail";
    return delta;
  }
  if (r.prompt.find("WAITED") != std::string::npos)
    return {.finish_reason = FinishReason::kError, .error = "waited", .error_code = StatusCode::kUnavailable};
  if (n == 2 && r.prompt.find("LATE") != std::string::npos)
    return {.finish_reason = FinishReason::kError, .error = "late", .error_code = StatusCode::kDeadline};
  if (n >= static_cast<size_t>(s.max_new_tokens)) {  // happens only with max_new_tokens = 0
    delta.completion_tokens = --r.generated;
    delta.finish_reason = FinishReason::kLength;
    if (!s.token_ids_logprob.empty()) delta.logprobs = {{{-1, 0, ""}, {}, listed_ids(s)}};
    return delta;
  }
  const bool end = n >= r.prompt.size() && !s.ignore_eos;
  const int32_t id = end ? kEnd : static_cast<unsigned char>(r.prompt[n % r.prompt.size()]);
  delta.token_ids = {id};
  r.pending += token_bytes(id);
  if (s.top_logprobs >= 0) {
    PositionLogprobs p{{id, -0.5f, token_bytes(id)}, {}, listed_ids(s)};
    for (int32_t k = 0; k < s.top_logprobs; ++k)
      p.top.push_back({'a' + k, -0.5f - static_cast<float>(k), token_bytes('a' + k)});
    delta.logprobs = {p};
  }
  if (!r.pending.empty() && r.pending.size() >= utf8_length(static_cast<unsigned char>(r.pending[0])))
    delta.text = std::exchange(r.pending, "");
  r.text += delta.text;
  for (const std::string& stop : s.stop) {
    if (r.text.size() >= stop.size() && r.text.compare(r.text.size() - stop.size(), stop.size(), stop) == 0) {
      delta.text.clear();  // stop strings have one byte, so no part was sent before
      delta.matched_stop = stop;
      delta.finish_reason = FinishReason::kStop;
      return delta;
    }
  }
  if (end) {
    delta.finish_reason = FinishReason::kStop;
    delta.matched_stop_token = id;
  } else if (r.generated >= s.max_new_tokens) {
    delta.finish_reason = FinishReason::kLength;
  }
  return delta;
}

}  // namespace fp4moe
