#!/bin/bash
[ "$(cat /work/found)" = "entry-77777" ] || { echo "wrong line"; exit 1; }
echo "1 passed"
