#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(redis-cli -p 6400 lrange jobs 0 -1)" = "$(cat /work/jobs)" ] || { echo "wrong list"; exit 1; }
echo "1 passed"
