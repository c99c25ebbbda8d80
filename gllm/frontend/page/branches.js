// Branches of a conversation: what stood in the place of a message that was edited or regenerated.
//
// Owns their shape. `messages` of a conversation is the branch that is shown. Its first message behind
// a fork holds `branches`: {index, tails}. A tail is all messages from the fork on; at `index`, the
// place of the branch that is shown, stands null. Tails hold forks of their own in the same way.

/** Which of its versions a message is: {index, count}. */
export function versions({ branches }) {
  return branches ? { index: branches.index, count: branches.tails.length } : { index: 0, count: 1 };
}

/** Put a message in the place of the one at a position; that one and all behind it are kept aside. */
export function fork(messages, at, message) {
  const tail = messages.splice(at);
  const branches = tail[0].branches ?? { index: 0, tails: [null] };
  delete tail[0].branches;
  branches.tails[branches.index] = tail;
  branches.index = branches.tails.push(null) - 1;
  message.branches = branches;
  messages.push(message);
}

/** Put a message in the place of the one at a position, which is lost with all behind it. */
export function replace(messages, at, message) {
  const [{ branches }] = messages.splice(at);
  if (branches) message.branches = branches;
  messages.push(message);
}

/** Show another version of the message at a position, with what followed it. */
export function switchTo(messages, at, index) {
  const { branches } = messages[at];
  const shown = branches.tails[index];
  const tail = messages.splice(at);
  delete tail[0].branches;
  branches.tails[branches.index] = tail;
  branches.tails[index] = null;
  branches.index = index;
  shown[0].branches = branches;
  messages.push(...shown);
}

/** All messages of all branches, those that are shown first. */
export function* everyMessage(messages) {
  yield* messages;
  for (const { branches } of messages) {
    for (const tail of branches?.tails ?? []) if (tail) yield* everyMessage(tail);
  }
}
