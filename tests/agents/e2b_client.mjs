// One rollout of an agent that uses E2B's JavaScript SDK. The first argument makes it diverge; E2B's environment variables
// have the URLs. Prints the number of answers in the shared prefix, then all answers as the agent sees them.
import { Sandbox } from 'e2b'

const LOOP = 'drawn=$RANDOM$RANDOM; while read -r line </work/requests; do echo $line $drawn >/work/replies; done'

async function outcome(call) {
  try {
    const answer = await call()
    if (answer === undefined) return null
    if (answer?.exitCode !== undefined) return { stdout: answer.stdout, stderr: answer.stderr, exitCode: answer.exitCode }
    return Array.isArray(answer) ? answer.map((entry) => entry?.name ?? entry) : (answer?.path ?? answer)
  } catch (error) {
    const { exitCode, stdout, stderr } = error.result ?? error
    return { raised: error.constructor.name, ...(exitCode === undefined ? { message: error.message } : { exitCode, stdout, stderr }) }
  }
}

const part = process.argv[2]
const sandbox = await Sandbox.create({ metadata: { part }, envs: { TEAM: 'blue' } })
const run = (command, options) => outcome(() => sandbox.commands.run(command, options))
let streamed = ''
const answers = [
  await run('mkdir /work; mkfifo /work/requests /work/replies; cd /work; echo shared >notes'),
  await run('echo $RANDOM$RANDOM | tee /work/drawn'),
  await run('pwd; cat notes; echo $TEAM $MORE; whoami', { cwd: '/work', envs: { MORE: 'more' }, user: 'root' }),
  await run('echo out; echo err >&2; exit 7'),
  await run('for i in 1 2 3; do echo $i; sleep 0.05; done', { onStdout: (data) => { streamed += data } }),
  streamed,
  await outcome(() => sandbox.files.write('/work/a.txt', 'a text')),
  await outcome(() => sandbox.files.write([{ path: '/work/c', data: '1' }, { path: '/work/d/e', data: '2' }])),
  await outcome(() => sandbox.files.read('/work/a.txt')),
  await outcome(() => sandbox.files.read('/work/none')),
  await outcome(() => sandbox.files.list('/work')),
  await outcome(() => sandbox.files.exists('/work/none')),
  await outcome(() => sandbox.files.makeDir('/work/new')),
  await outcome(() => sandbox.files.rename('/work/c', '/work/new/c')),
  await outcome(() => sandbox.files.remove('/work/d')),
]
let takeLine
const first = new Promise((resolve) => { takeLine = resolve })
const server = await sandbox.commands.run(LOOP, { background: true, timeoutMs: 0 })
answers.push(await run('echo first >/work/requests; cat /work/replies'))
const reader = await sandbox.commands.run('while read -r line; do echo got $line; done', {
  background: true, stdin: true, timeoutMs: 0, onStdout: takeLine,
})
await sandbox.commands.sendStdin(reader.pid, 'one\n')
answers.push(await first, await outcome(() => reader.kill()), await outcome(() => reader.wait()))
const shared = answers.length
answers.push(
  await run(`echo ${part} >/work/part; cat /work/part /work/drawn`),
  await run(`echo ${part} >/work/requests; cat /work/replies`),
  await outcome(() => sandbox.files.read('/work/part')),
  await outcome(() => server.kill()),
  await outcome(() => sandbox.commands.list()),
  await run('cat /work/new/c; ls /work'),
)
await sandbox.kill()
console.log(JSON.stringify([shared, answers]))
process.exit(0)
