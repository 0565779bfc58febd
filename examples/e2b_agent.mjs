// Two rollouts over E2B's SDK (`npm install e2b`): node examples/e2b_agent.mjs [proxy's URL]
// Both make the same first calls, and then each its own. The second runs nothing until it leaves the first one's way.
const proxy = process.argv[2] ?? 'http://127.0.0.1:8700'
process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = `${proxy}/t/e2b-example-js/e2b`
process.env.E2B_API_KEY = 'e2b_' + '0'.repeat(40)
const { Sandbox } = await import('e2b')

for (const name of ['first', 'second']) {
  const box = await Sandbox.create()
  await box.files.write('/root/notes', 'shared\n')
  const drawn = await box.commands.run('echo $RANDOM | tee /root/drawn')
  // From here on each goes its own way.
  await box.commands.run(`echo ${name} >>/root/notes`)
  const told = await box.commands.run('cat /root/notes /root/drawn')
  console.log(`${name}: drawn ${drawn.stdout.trim()}, read ${told.stdout.trim().split('\n')}`)
  await box.kill()
}
