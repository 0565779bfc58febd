#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(psql -h 127.0.0.1 -p 5440 -U me postgres -tAc 'select count(*), sum(square) from t')" = "20|2870" ] || { echo "wrong table"; exit 1; }
echo "1 passed"
