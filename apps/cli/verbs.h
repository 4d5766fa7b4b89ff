// The verbs of the command. Each takes what follows its name and returns the exit code; failures are thrown.
#pragma once

#include <string>
#include <vector>

namespace moeflux::cli {

using Arguments = std::vector<std::string>;

// Exit codes. A user error is one that other arguments or another model folder would cure.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUserError = 2;
inline constexpr int kExitInterrupted = 130;  // 128 + SIGINT, as shells have it

int verb_run(Arguments arguments);
int verb_demo(Arguments arguments);
int verb_logits(Arguments arguments);
int verb_perplexity(Arguments arguments);
int verb_tokenize(Arguments arguments);
int verb_inspect(Arguments arguments);
int verb_plan(Arguments arguments);
int verb_simulate(Arguments arguments);
int verb_synth(Arguments arguments);
int verb_bench(Arguments arguments);
int verb_pack(Arguments arguments);
int verb_verify(Arguments arguments);
int verb_doctor(Arguments arguments);
int verb_version(Arguments arguments);

}  // namespace moeflux::cli
