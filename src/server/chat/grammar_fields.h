// Request fields that constrain the output's text.
#pragma once

#include "fp4moe/engine.h"
#include "server/json.h"

namespace fp4moe {

// Reads SGLang's json_schema (text or object), regex, ebnf and structural_tag, vLLM's structured_outputs and
// guided_*, and llama-server's grammar. Fails if more than one is given, or if one is given and the engine
// has no grammar backend.
GrammarSpec read_grammar(const Engine& engine, Fields& fields);
// Reads OpenAI's response_format, also in llama-server's shapes, into `grammar`; fails if `grammar` already
// has a constraint.
void read_response_format(const Engine& engine, Fields& fields, GrammarSpec& grammar);

// The grammar as the "format" of a structural tag. Precondition: its kind is neither kStructuralTag nor
// kNone.
json structural_format(const GrammarSpec& grammar);
// `place`: where the schema is in the request, for errors.
json json_schema_format(json schema, const std::string& place);
GrammarSpec structural_tag(json format);

}  // namespace fp4moe
