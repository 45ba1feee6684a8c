// Flags of vLLM and llama.cpp that this binary does not have, with what to use instead. Flags of SGLang are
// in model/sglang_names.h, and those with another name here are aliases (tools/engine_flags.cc).
#pragma once

#include <span>
#include <string>
#include <vector>

namespace fp4moe {

struct PeerFlag {
  const char* names;  // "--a,-b"
  const char* ours;   // the flag to use instead, or a flag and its value; null: none
  const char* note;   // with `ours`: an addition, or ""; without: why no flag is needed, or what to do
};
std::span<const PeerFlag> peer_flags();

// Whether a row has this name.
bool is_peer_flag(const std::string& name);

// The hint for a flag of a subcommand that has the flags `known`: "use --x (note)" or the note. Empty: no row
// fits, or the subcommand does not load a model.
std::string peer_flag_hint(const std::string& name, const std::vector<std::string>& known);

// The subcommand that does what `name` does elsewhere; empty: none.
std::string peer_subcommand(const std::string& name);

}  // namespace fp4moe
