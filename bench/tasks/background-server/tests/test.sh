#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(curl -s http://127.0.0.1:8080/health)" = ok ] || { echo "no server"; exit 1; }
[ "$(curl -s http://127.0.0.1:8080/index.txt)" = "first page" ] || { echo "no page"; exit 1; }
echo "2 passed"
