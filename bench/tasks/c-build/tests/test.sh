#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
cd /work/calc && make -s && [ "$(./calc 6 7)" = 42 ] && [ "$(./calc 3 5)" = 15 ] || { echo "failed"; exit 1; }
echo "2 passed"
