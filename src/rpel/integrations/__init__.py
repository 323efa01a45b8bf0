"""Ways in from what people already use. Each module needs its own library; nothing else imports them."""
