#!/bin/bash
cd /work/calc && make -s && [ "$(./calc 6 7)" = 42 ] && [ "$(./calc 3 5)" = 15 ] || { echo "failed"; exit 1; }
echo "2 passed"
