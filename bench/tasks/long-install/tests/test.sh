#!/bin/bash
[ "$(ls /opt/parts | wc -l)" = 800 ] && [ "$(cat /opt/parts/400.out)" = "400 built" ] || { echo "not installed"; exit 1; }
echo "2 passed"
