#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(cat /work/count)" = 250 ] && [ "$(sqlite3 /work/shop.db 'select count(*) from orders')" = 250 ] || { echo "wrong number"; exit 1; }
[ ! -e /work/shop.db-wal ] || { echo "a log is left"; exit 1; }
echo "2 passed"
