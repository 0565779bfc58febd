#!/bin/bash
cd / && [ "$(echo 'One two TWO' | /usr/bin/python3 -B /work/words.pyz)" = two ] || { echo "wrong word"; exit 1; }
cd /work && /usr/bin/python3 -B -c 'from words import count; assert count("A a b") == {"a": 2, "b": 1}' || exit 1
echo "2 passed"
