"""The operator: turns InferenceServices into StatefulSets, and says in their status what is going on."""
