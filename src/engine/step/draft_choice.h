// DraftChoice: how many drafts each sequence may have in a step, so that drafting pays
// (--speculative-adaptive).
//
// The choice maximizes the expected tokens per second of the step: a draft's gain is the probability that it
// and all before it are right, estimated from the sequence's own last drafts with those of all sequences as
// the prior; its cost is the measured time of a step with one more row. Sequences whose drafts do not pay are
// probed with a small share of the time, so that they draft again when they begin to pay. Texts do not depend
// on the choice.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/schedule/draft_record.h"

namespace fp4moe {

// How the time of a decode step grows with its rows before steps have been measured: a step reads the dense
// weights and the experts of its rows once, and computes each row.
struct StepCost {
  double dense_bytes = 1;      // read by every step
  double expert_bytes = 0;     // one expert in all layers
  double num_experts = 1;      // of a layer
  double top_k = 1;            // experts of a row
  double row_share = 1.0 / 8;  // arithmetic of a row, relative to the bytes that a step with one row reads

  // Time of a step relative to that of one with one row. Rows choose experts independently.
  double relative(double num_rows) const;
};

// The time of a decode step by its number of rows, from steps measured so far. If a step takes longer than
// expected (a longer context, a busier machine), all numbers of rows are expected to.
class StepTimes {
 public:
  explicit StepTimes(const StepCost& prior) : prior_(prior) {}
  void add(int64_t num_rows, double seconds);
  double seconds(int64_t num_rows) const;  // 0 before the first add()

 private:
  // Measured time relative to unit_ * prior_.
  struct Point {
    double factor = 1;
    int num_steps = 0;
  };
  double factor(int64_t num_rows) const;

  const StepCost prior_;
  double unit_ = 0;                  // seconds of a step with one row, by the prior
  std::map<int64_t, Point> points_;  // by rows, rounded
};

// Used by the loop's thread only.
class DraftChoice {
 public:
  // A sequence that may draft in the next step.
  struct Candidate {
    DraftRecord* record = nullptr;
    int64_t num_drafts = 0;  // in: possible; out: chosen
  };

  explicit DraftChoice(const StepCost& cost) : times_(cost) {}

  // Chooses the drafts of a step whose decoding sequences have num_rows rows without drafts. draft_seconds:
  // time to draft one position of all sequences, if they are not drafted yet.
  void choose(std::span<Candidate> candidates, int64_t num_rows, double draft_seconds = 0);
  // Adds a measured step that only decodes; num_sequences: its rows that are no drafts.
  void add_step(int64_t num_sequences, int64_t num_rows, double seconds);
  void add_verified(DraftRecord& record, int64_t num_seen, int64_t num_right);

 private:
  struct Gain {
    double tokens;
    size_t candidate;
    int64_t position;
  };
  bool needs_plain_step() const;
  void list_gains(std::span<const Candidate> candidates);
  void probe(std::span<Candidate> candidates, std::span<const int64_t> possible, int64_t num_rows);

  StepTimes times_;
  DraftRecord all_;  // of all sequences
  std::vector<Gain> gains_;
  std::vector<int64_t> possible_;
  int64_t num_choices_ = 0, num_steps_ = 0, num_plain_ = 0, last_plain_ = 0;
  double credit_ = 0;         // seconds that probes may take
  double token_seconds_ = 0;  // of a token without drafts
};

}  // namespace fp4moe
