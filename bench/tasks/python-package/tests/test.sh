#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
cd / && [ "$(echo 'One two TWO' | /usr/bin/python3 -B /work/words.pyz)" = two ] || { echo "wrong word"; exit 1; }
cd /work && /usr/bin/python3 -B -c 'from words import count; assert count("A a b") == {"a": 2, "b": 1}' || exit 1
echo "2 passed"
