package main

import "github.com/spf13/cobra"

func newDemo() *cobra.Command     { return &cobra.Command{Use: "demo"} }
func newRecord() *cobra.Command   { return &cobra.Command{Use: "record"} }
func newPublish() *cobra.Command  { return &cobra.Command{Use: "publish"} }
func newSnapshot() *cobra.Command { return &cobra.Command{Use: "snapshot"} }
