"""ALFWorld played by an agent: a loop on the openai client, without torch. Every other task it streams."""

import re

ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def text_of(answer, streams):
    if not streams:
        return answer.choices[0].message.content or ""
    return "".join(part.choices[0].delta.content or "" for part in answer if part.choices)


def play_alfworld(environment_factory, task, client):
    environment, ask = environment_factory(), client.openai().chat.completions.create
    seen, messages, reward = environment.reset(**task), [], 0.0
    streams, goal = len(task["task_id"]) % 2 == 0, seen.task or ""
    for turn in range(4):
        listed = "\n".join(seen.admissible_actions)
        shown = f"{goal}\n{seen.text}\nActions:\n{listed}" if turn == 0 else f"{seen.text}\nActions:\n{listed}"
        messages.append({"role": "user", "content": shown})
        said = text_of(ask(model=client.model, messages=messages, stream=streams), streams)
        messages.append({"role": "assistant", "content": said})
        found = ACTION.search(said)
        result = environment.step(found.group(1).strip() if found else said[-30:])
        seen, reward = result.observation, reward + result.reward
        if result.terminated or result.truncated:
            break
    environment.close()
    return reward, reward > 0, {"turns": turn + 1}
