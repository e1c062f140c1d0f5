// Package store keeps snapshots across restarts: generations of opaque chunks
// in a Badger directory, of which exactly one, the newest whole one, is served.
//
// It promises three things. A kill at any instant, or a full disk, leaves the
// previous or the new generation whole, never a mixture. What Load hands out is
// what Write was given: every chunk carries its own checksum and its own place,
// and all of them are verified before the first one is handed out. And damage
// is never fatal and never trusted: a damaged directory is set aside (renamed,
// one kept) with one log line, and the store goes on empty.
//
// What the chunks mean is left to the caller; the package knows bytes, kinds
// and a small manifest. It is not a database: a few writes an hour of tens or
// hundreds of megabytes, one reader, one process at a time.
//
// The rules about Badger (which keys, in which order, what is checked before it
// opens) come from measurements of Badger v4.9.6 under kill -9, damage and full
// disks; docs/snapshots.md tells them, and the formats byte by byte.
package store
