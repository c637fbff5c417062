#!/usr/bin/env bash
# Runs the fuzz targets of fuzz/ one after the other, each until it has tried RUNS inputs or
# found a failure. The failing input is in fuzz/artifacts/; fuzz/README.md explains the next steps.
#
#   RUNS=1000000 TARGET="open table fields jpeg manifest shard program" scripts/fuzz.sh [libFuzzer flag...]
#
# Stable Rust and gcc are enough: no sanitizer is used, and a flag of gcc instruments C code.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly CARGO_FUZZ_VERSION=0.13.2
# Maximum bytes of an input: small, for many inputs a second, but enough for a few samples or scans.
declare -A max_bytes=([open]=4096 [table]=4096 [fields]=12288 [jpeg]=2048 [manifest]=4096 [shard]=1024 [program]=32768)

# Not one of the tools that setup installs everywhere; removed, like them, when scripts/tools.txt changes.
install_cargo_fuzz() {
    if [ -x .tools/bin/cargo-fuzz ]; then return; fi
    echo "fuzz: compiling cargo-fuzz $CARGO_FUZZ_VERSION into .tools/ (a minute)"
    cargo install cargo-fuzz --quiet --locked --version "$CARGO_FUZZ_VERSION" --root .tools \
        --target-dir "$target_dir/tools"
}

# Separate from other builds, which must not be compiled again because of these flags.
readonly target_dir="${CARGO_TARGET_DIR:-$PWD/target}/fuzz"
unset CARGO_TARGET_DIR
# See fuzz/src/coverage.rs. The programs that cmake links to test the compiler lack this function and
# are not run.
export CFLAGS_x86_64_unknown_linux_gnu="-fsanitize-coverage=trace-pc -Wl,--defsym=__sanitizer_cov_trace_pc=0"

install_cargo_fuzz
for target in ${TARGET:-open table fields jpeg manifest shard program}; do
    corpus="fuzz/corpus/$target"
    mkdir -p "$corpus"
    # -timeout: seconds for one input. -rss_limit_mb: for what C code allocates.
    PATH="$PWD/.tools/bin:$PATH" cargo fuzz run --sanitizer none --features libfuzzer \
        --target-dir "$target_dir" "$target" "$corpus" "fuzz/seeds/$target" -- \
        -runs="${RUNS:-1000000}" -max_len="${max_bytes[$target]}" -timeout=5 -rss_limit_mb=512 \
        -print_final_stats=1 "$@"
done
