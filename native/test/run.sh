#!/bin/sh
# run.sh: runs a native test program and says in a line how that went: BUILD=folder sh test/run.sh name
# Status 77 is "cannot run here". The exit status says whether it failed; then the end of what it said is shown.
# A thread of Rigel's that does not end within 200 ms is left behind by design (rg_join); on a busy machine that is any of them.
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1 exitcode=66 report_thread_leaks=0}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-halt_on_error=1 print_stacktrace=1}"
# What a process leaves allocated when it ends is no leak of Rigel's: nothing is freed at exit by design.
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=0}"
output=$(timeout -k 5 300 "$BUILD/$1" 2>&1)
case $? in
0) echo "ok      $1" ;;
77) echo "skipped $1: $(printf '%s\n' "$output" | tail -n 1)" ;;
*) echo "FAILED  $1"; printf '%s\n' "$output" | tail -n 60; exit 1 ;;
esac
