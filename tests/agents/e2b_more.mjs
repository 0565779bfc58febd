// One rollout of an agent that uses rare features of E2B's JavaScript SDK: terminals, watches, polls, timeouts.
// Prints all answers as the agent sees them.
import { Sandbox } from 'e2b'

async function outcome(call) {
  try {
    const answer = await call()
    return answer === undefined ? null : answer
  } catch (error) {
    return { raised: error.constructor.name, exitCode: (error.result ?? error).exitCode ?? null }
  }
}

async function polled(call) {
  for (let count = 0; count < 1000; count++) if (await call()) return true
  return false
}

const sandbox = await Sandbox.create({ timeoutMs: 3600_000 })
const before = (await sandbox.getInfo()).endAt
await sandbox.setTimeout(7200_000)
await sandbox.commands.run('mkdir /work; echo shared >/work/notes')

const reader = await sandbox.commands.run('sleep 0.4; read a; read b; echo $a-$b >/work/read', {
  background: true, stdin: true, timeoutMs: 0,
})
for (let time = 0; time < 2; time++) await sandbox.commands.sendStdin(reader.pid, 'same\n')
await reader.disconnect()
const answers = [
  (await sandbox.getInfo()).endAt > before,
  await polled(() => sandbox.files.exists('/work/read')),
  await outcome(() => sandbox.files.read('/work/read')),
  await polled(async () => (await sandbox.commands.list()).length === 0),
  await outcome(() => sandbox.commands.connect(4)),
]

let output = '', notify
const received = (text) => new Promise((resolve) => { notify = () => { if (output.includes(text)) resolve(true) }; notify() })
const terminal = await sandbox.pty.create({
  rows: 24, cols: 80, cwd: '/work', timeoutMs: 0, onData: (data) => { output += new TextDecoder().decode(data); notify?.() },
})
const type = (text) => sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
await type('stty size; x=$((40+2))\n')
answers.push(await received('24 80\r\n'))
await sandbox.pty.resize(terminal.pid, { rows: 30, cols: 100 })
await type('stty size; echo $x$x\n')
answers.push(await received('30 100\r\n4242\r\n'))
answers.push(await outcome(() => sandbox.commands.sendStdin(terminal.pid, 'x')))
answers.push(await outcome(() => sandbox.pty.kill(terminal.pid)), await outcome(() => terminal.wait()))
answers.push(await outcome(() => sandbox.pty.kill(terminal.pid)))

const events = []
let notifyEvent
const eventReceived = (event) => new Promise((resolve) => {
  notifyEvent = () => { if (events.includes(event)) resolve([...events]) }
  notifyEvent()
})
const watch = await sandbox.files.watchDir('/work', (event) => { events.push(`${event.type} ${event.name}`); notifyEvent?.() })
await sandbox.files.write('/work/new', '1')
answers.push(await eventReceived('write new'))
await sandbox.commands.run('rm /work/new')
answers.push(await eventReceived('remove new'))
await watch.stop()
answers.push(await outcome(() => sandbox.files.watchDir('/work/none', () => {})))

await sandbox.setTimeout(0)
answers.push(await outcome(() => sandbox.isRunning()), await outcome(() => sandbox.commands.run('echo late')))
answers.push(await outcome(() => sandbox.files.read('/x')), await outcome(() => Sandbox.getInfo(sandbox.sandboxId)))
answers.push(await outcome(() => Sandbox.connect(sandbox.sandboxId)), await outcome(() => sandbox.kill()))
console.log(JSON.stringify(answers))
process.exit(0)
