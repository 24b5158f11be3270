"""What a rank sends, by the rules: requests, the grants that they meet, and the stages that they ask for.

Open `sender` first: verbs go in there. `request` is one request's record, `open_sends` all that have not ended.
`grants` and `unmet` bring grants and requests of one name together, `anybody` those that name no receiver.
`grant_checks` says whether a verb fits its grant, `missing` what `finish` lacks. `handover` is what the resident loop
is given and gives back. `endings` seals, fails and ends requests. `staging_requester` asks for stages.
"""
