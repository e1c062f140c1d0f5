package main

import "fmt"

// The known differences. Each says what may differ, which of the two is right
// and why; a request names those that it expects, and checks kvindexd's answer
// in any case.

var (
	whole       = []string{"status", "kind", "body"}
	scoreFields = []string{"body.scores", "body.instances"}
)

// plainly wants an answer of one of these statuses that is no JSON.
func plainly(codes ...int) func(answer) error {
	return func(a answer) error {
		for _, c := range codes {
			if a.status == c && a.kind != "json" {
				return nil
			}
		}
		return fmt.Errorf("status %d with %s", a.status, a.kind)
	}
}

// Differences of form.
var (
	errorForm = &deviation{
		id: "error-form", fields: whole, dynamo: plainly(400, 404, 405, 415, 422),
		why: `Dynamo's framework answers a body that it cannot read with 422 (400 for broken JSON) and plain text, and 404 and 405 with nothing. Here it is 400, 404, 405, 415 and always {"error": text} (the native form where no drop-in route is meant).`,
	}
	healthBody = &deviation{
		id: "health-body", fields: []string{"kind", "body"}, dynamo: status(200),
		why: "GET /health is empty there; here it says the version too.",
	}
	moreLanguages = &deviation{
		id: "more-languages", fields: whole, dynamo: plainly(422),
		why: "Read here, refused there: instance ids that are strings, modelname and model for model_name, a registration without block_size (it is learned), seq_hashes, hashes over 2^63 as unsigned numbers, /unregister without a model. Mooncake's conductor and its documentation have them.",
	}
)

// Differences of registration.
var (
	sameAgain = &deviation{
		id: "same-again", fields: whole, dynamo: refused(409),
		why: "The identical registration again is 201 here, so that a registrar may repeat itself; there it is 409.",
	}
	onePublisher = &deviation{
		id: "one-publisher", fields: whole, dynamo: is(201, ok),
		why: "A publisher is one rank of one instance. There, two may subscribe to it and its blocks count for both.",
	}
	manyPlaces = &deviation{
		id: "many-places", fields: whole, dynamo: refused(409),
		why: "Here one instance may serve several models, tenants and groups, each with its own blocks, and one partition may hold several block sizes.",
	}
	allowList = &deviation{
		id: "allow-list", fields: whole, dynamo: is(201, ok),
		why: "A registration makes the daemon dial only what --allow-endpoint covers: private and loopback addresses by default. There it is any address, and inproc:// besides, which leads nowhere.",
	}
	badValues = &deviation{
		id: "bad-values", fields: whole, dynamo: is(201, ok),
		why: "Taken there: a model without a name, a block_size of 0, and peers that are no base URL. None can work.",
	}
	liveness = &deviation{
		id: "liveness", fields: []string{"body.*.status", "body.*.listeners.*.status", "body.*.listeners.*.last_error"}, dynamo: status(200),
		why: "An instance and its listeners are pending here until the publisher answers, with the last error; there they are active from the registration on.",
	}
	rankLeaves = &deviation{
		id: "rank-leaves", fields: []string{"body.403"}, dynamo: status(200),
		why: "/unregister with dp_rank and no routing_group takes that rank here; there the rank is passed over and the whole instance goes.",
	}
	tenants = &deviation{
		id: "tenants", fields: whole, dynamo: status(200),
		why: "tenant_id separates here. There it is accepted and ignored: what one tenant holds is told to every other.",
	}
)

// Differences of scores: kvindexd's are what the publisher holds.
var (
	hole = &deviation{
		id: "hole", fields: scoreFields,
		why: "Removing a block does not remove its descendants: vLLM keeps them, and the block stored again makes them reachable without another word. There they are lost until they are stored again: too short.",
	}
	otherHandles = &deviation{
		id: "other-handles", fields: scoreFields,
		why: "Engine hashes are handles of one worker: without one PYTHONHASHSEED for all, vLLM's workers name equal content differently. There the tree keeps the first worker's hashes, so that another's children are refused (too short) and its removals miss (too long).",
	}
	copyCount = &deviation{
		id: "copies", fields: scoreFields,
		why: "vLLM announces each physical copy of a block by itself, stored and removed; the block is gone with the last. There it is gone with the first: too short.",
	}
	byteHashes = &deviation{
		id: "byte-hashes", fields: scoreFields,
		why: "Engine hashes that are byte strings, an option of vLLM's, are not read there: such a worker holds nothing.",
	}
	saltUnread = &deviation{
		id: "salt-unread", fields: scoreFields,
		why: "vLLM puts a cache salt bare into a block's extra keys. There it is read only with the mark dynamo-cache-salt: in front, so that salted blocks are credited to prompts without the salt (too long, and across tenants) and not to those with it.",
	}
	imageUnread = &deviation{
		id: "image-unread", fields: scoreFields,
		why: "A block with an image in its extra keys is not the text of its placeholder tokens. There it is credited to any prompt with these tokens: too long.",
	}
	everyGroup = &deviation{
		id: "every-group", fields: scoreFields,
		why: "With several groups of full attention a block is held where all of them hold it. There the first word of any group counts: too long.",
	}
	pairsUnread = &deviation{
		id: "pairs-unread", fields: scoreFields,
		why: "Blocks announced as pairs of tokens (EAGLE) match nobody there: the query is hashed over plain windows.",
	}
	lookahead = &deviation{
		id: "lookahead", fields: scoreFields,
		why: "A block with lookahead tokens is the same block only if these are. There they are passed over: a prompt that ends or goes on otherwise right behind the block is credited with it: too long.",
	}
	orphans = &deviation{
		id: "orphans", fields: scoreFields,
		why: "Children that come before their parent are kept here and credited once it is there. There they are dropped: too short.",
	}
	eventSize = &deviation{
		id: "event-size", fields: scoreFields,
		why: "The block size is the one in the events: hybrid models and context parallelism announce multiples of what was configured. There such blocks match nobody.",
	}
	tierReturn = &deviation{
		id: "tier-return", fields: scoreFields,
		why: "cpu continues the run over blocks in host memory or on the device. Where blocks behind those in host memory are on the device again, Dynamo ends it: too short.",
	}
	newProcess = &deviation{
		id: "new-process", fields: scoreFields,
		why: "A publisher that restarts counts from 0 again. Here that is noticed, the stream is cleared and followed. There its batches are dropped as stale until the number passes the old one, while the old blocks stay: too long, then too short.",
	}
)

// allDeviations are the known differences, in the order of the report.
var allDeviations = []*deviation{
	errorForm, healthBody, moreLanguages,
	sameAgain, onePublisher, manyPlaces, allowList, badValues, liveness, rankLeaves, tenants,
	hole, otherHandles, copyCount, byteHashes, saltUnread, imageUnread, everyGroup, pairsUnread, lookahead,
	orphans, eventSize, tierReturn, newProcess,
}
