package main

import "github.com/spf13/cobra"

func newServe() *cobra.Command    { return &cobra.Command{Use: "serve"} }
func newDemo() *cobra.Command     { return &cobra.Command{Use: "demo"} }
func newMatch() *cobra.Command    { return &cobra.Command{Use: "match"} }
func newExplain() *cobra.Command  { return &cobra.Command{Use: "explain"} }
func newWorkers() *cobra.Command  { return &cobra.Command{Use: "workers"} }
func newModels() *cobra.Command   { return &cobra.Command{Use: "models"} }
func newRecord() *cobra.Command   { return &cobra.Command{Use: "record"} }
func newPublish() *cobra.Command  { return &cobra.Command{Use: "publish"} }
func newSnapshot() *cobra.Command { return &cobra.Command{Use: "snapshot"} }
