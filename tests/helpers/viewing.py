"""For tests of the viewer: episodes by hand, and what is done in a browser."""

from g2po_trl import Step, Trajectory

BAD_TEXT = "</script><b>bold</b> & <img src=x onerror=alert(1)> {braces} ünïcode 日本"


def trajectory(task_id, names, reward, outcome=None, **facts):
    """An episode that was in the rooms of these names, and did `go 0`, `go 1`, … there."""
    steps = [
        Step(
            f"room {name}",
            f"go {i}",
            completion=f"<think></think><action>go {i}</action>",
            admissible_actions=["go 0"],
        )
        for i, name in enumerate(names)
    ]
    outcome = outcome or ("success" if reward else "failure")
    return Trajectory(task_id, steps, reward, outcome, f"the end of {names}", **facts)


def until(browser, condition, seconds=10):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, seconds, 0.1).until(condition)


def opened(browser, address):
    """Open the page and wait until it is drawn."""
    browser.get(address)
    until(browser, lambda b: b.execute_script("return document.body.dataset.ready") == "yes", 30)


def press(browser, *keys):
    """Keys to where the focus is."""
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()
