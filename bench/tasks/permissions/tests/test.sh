#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
cd /work/shared || exit 1
[ "$(stat -c '%g %a' .)" = "2000 2770" ] || { echo "wrong mode"; exit 1; }
getfacl -n . 2>/dev/null | grep -q '^user:3000:r-x' || { echo "no right of the user"; exit 1; }
getfacl -n . 2>/dev/null | grep -q '^default:group:2000:rwx' || { echo "no default"; exit 1; }
echo "3 passed"
