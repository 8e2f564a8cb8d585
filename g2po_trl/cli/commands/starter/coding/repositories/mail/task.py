def address(name, host):
    return name + "@" + host


def is_mail(text):
    return "@" in text and len(text) >= 5


def unread(mails, read):
    return len(mails) - len(read)


def senders(mails):
    result = []
    for mail in mails:
        if mail[0] not in result:
            result.append(mail[0])
    return result
