#!/bin/sh
# run.sh: runs native test programs one by one: BUILD=folder sh test/run.sh name...
# Status 77 is "cannot run here". The last line counts; the exit status says whether any failed.
passed=0 failed=0 skipped=0
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1 exitcode=66}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-halt_on_error=1 print_stacktrace=1}"
# What a process leaves allocated when it ends is no leak of Rigel's: nothing is freed at exit by design.
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=0}"
for name in "$@"; do
    output=$(timeout -k 5 300 "$BUILD/$name" 2>&1)
    case $? in
    0) passed=$((passed + 1)); echo "ok      $name" ;;
    77) skipped=$((skipped + 1)); echo "skipped $name: $(printf '%s\n' "$output" | tail -n 1)" ;;
    *) failed=$((failed + 1)); echo "FAILED  $name"; printf '%s\n' "$output" | tail -n 60 ;;
    esac
done
echo "native: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
