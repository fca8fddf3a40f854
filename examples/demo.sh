#!/usr/bin/env bash
# Builds Headway and runs its demo. Needs Rust, a C compiler and make; cmake, which one dependency builds with, is installed where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v cmake >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends cmake g++ make
    elif command -v python3 >/dev/null; then
        python3 -m venv target/cmake && target/cmake/bin/pip install --quiet cmake
        export PATH="$PWD/target/cmake/bin:$PATH"
    else
        echo "cmake is missing: install it with your system's packages" >&2
        exit 1
    fi
fi
exec cargo run --release --quiet -- demo "$@"
