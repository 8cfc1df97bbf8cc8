# Stands in for oneAPI's scripts: it talks, and says in a variable that it was read.
# shellcheck shell=bash
echo ":: initializing oneAPI environment ..."
export ONEAPI_READ="${ONEAPI_READ-}${BASH_SOURCE[0]} $1;"
