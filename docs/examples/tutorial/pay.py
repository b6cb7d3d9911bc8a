from shop import charge

results = [charge.delay(42, amount=999) for _ in range(2)]
for result in results:
    print(result.id, "got the", result.get())
